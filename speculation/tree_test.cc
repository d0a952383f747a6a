#include "speculation/tree.h"

#include <random>
#include <set>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace coppice::speculation {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

DraftTree Make(std::vector<int32_t> tokens, std::vector<int32_t> parents) {
  DraftTree tree;
  tree.token = std::move(tokens);
  tree.parent = std::move(parents);
  for (int32_t parent : tree.parent) {
    tree.depth.push_back(parent < 0 ? 0 : tree.depth[parent] + 1);
  }
  return tree;
}

DraftTree RandomTree(std::mt19937& rng, int nodes, int vocab) {
  DraftTree tree = RootOnly(static_cast<int32_t>(rng() % vocab));
  while (tree.nodes() < nodes) {
    const int32_t parent = static_cast<int32_t>(rng() % tree.nodes());
    const int32_t token = static_cast<int32_t>(rng() % vocab);
    bool taken = false;
    for (int j = 1; j < tree.nodes(); ++j) {
      taken = taken || (tree.parent[j] == parent && tree.token[j] == token);
    }
    if (taken) continue;
    tree.token.push_back(token);
    tree.parent.push_back(parent);
    tree.depth.push_back(tree.depth[parent] + 1);
  }
  return tree;
}

constexpr auto kNeverStop = [](int32_t, int) { return false; };

TEST(ValidateTest, AcceptsTrees) {
  EXPECT_TRUE(Validate(RootOnly(7)).ok());
  EXPECT_TRUE(Validate(Make({1, 2, 3, 2}, {-1, 0, 0, 1})).ok());
  std::mt19937 rng(1);
  for (int round = 0; round < 200; ++round) {
    EXPECT_TRUE(Validate(RandomTree(rng, 1 + round % kMaxNodes, 100)).ok());
  }
}

TEST(ValidateTest, NamesTheCulprit) {
  auto message = [](const DraftTree& tree) { return std::string(Validate(tree).message()); };
  EXPECT_THAT(message(DraftTree{}), HasSubstr("has 0"));
  std::mt19937 rng(2);
  EXPECT_THAT(message(RandomTree(rng, kMaxNodes + 1, 1000)), HasSubstr("has 65"));
  DraftTree tree = Make({1, 2, 3}, {-1, 0, 1});
  tree.parent[2] = 2;
  EXPECT_THAT(message(tree), HasSubstr("node 2's parent is 2"));
  tree.parent[2] = -1;
  EXPECT_THAT(message(tree), HasSubstr("node 2's parent is -1"));
  tree = Make({1, 2, 3}, {-1, 0, 1});
  tree.depth[2] = 1;
  EXPECT_THAT(message(tree), HasSubstr("node 2's depth is 1"));
  EXPECT_THAT(message(Make({1, 2, 2}, {-1, 0, 0})), HasSubstr("nodes 1 and 2 are siblings"));
  tree = Make({1, 2}, {-1, 0});
  tree.parent[0] = 0;
  EXPECT_THAT(message(tree), HasSubstr("root"));
  tree = Make({1, 2}, {-1, 0});
  tree.depth.pop_back();
  EXPECT_THAT(message(tree), HasSubstr("depths (1)"));
}

TEST(ValidateTest, SurvivesAnyInput) {
  std::mt19937 rng(3);
  int accepted = 0;
  for (int round = 0; round < 20000; ++round) {
    DraftTree tree;
    const int nodes = static_cast<int>(rng() % 6);
    for (int i = 0; i < nodes; ++i) {
      tree.token.push_back(static_cast<int32_t>(rng() % 3));
      tree.parent.push_back(static_cast<int32_t>(rng() % 6) - 2);
      tree.depth.push_back(static_cast<int32_t>(rng() % 4));
    }
    if (rng() % 8 == 0 && nodes > 0) tree.depth.pop_back();
    if (!Validate(tree).ok()) continue;
    ++accepted;
    for (int i = 1; i < tree.nodes(); ++i) {
      ASSERT_LT(tree.parent[i], i);
      ASSERT_GE(tree.parent[i], 0);
      ASSERT_EQ(tree.depth[i], tree.depth[tree.parent[i]] + 1);
    }
  }
  EXPECT_GT(accepted, 50);
}

TEST(AncestorWordsTest, EqualsWalkingUp) {
  std::mt19937 rng(4);
  for (int round = 0; round < 200; ++round) {
    const DraftTree tree = RandomTree(rng, 1 + static_cast<int>(rng() % kMaxNodes), 1000);
    const std::vector<uint64_t> words = AncestorWords(tree);
    ASSERT_EQ(words.size(), tree.token.size());
    for (int i = 0; i < tree.nodes(); ++i) {
      uint64_t expected = 0;
      for (int node = i; node >= 0; node = tree.parent[node]) expected |= uint64_t{1} << node;
      EXPECT_EQ(words[i], expected);
    }
  }
}

TEST(WalkTest, DescendsWhereTheTargetAgrees) {
  //        0 (root)
  //      1(5)   2(6)
  //     3(7)    4(7) 5(8)
  const DraftTree tree = Make({1, 5, 6, 7, 7, 8}, {-1, 0, 0, 1, 2, 2});
  const std::vector<int32_t> draws = {6, 0, 8, 0, 0, 9};
  std::vector<int> asked;
  const WalkResult result = Walk(
      tree,
      [&](int node) {
        asked.push_back(node);
        return draws[node];
      },
      kNeverStop);
  EXPECT_THAT(result.path, ElementsAre(0, 2, 5));
  EXPECT_THAT(result.tokens, ElementsAre(6, 8, 9));
  EXPECT_THAT(asked, ElementsAre(0, 2, 5));
}

TEST(WalkTest, StopsBeforeDrawingAnother) {
  const DraftTree tree = Make({1, 2, 3, 4}, {-1, 0, 1, 2});
  auto choose = [&](int node) { return node + 2; };
  WalkResult result = Walk(tree, choose, [](int32_t token, int) { return token == 3; });
  EXPECT_THAT(result.tokens, ElementsAre(2, 3));
  EXPECT_THAT(result.path, ElementsAre(0, 1));
  result = Walk(tree, choose, [](int32_t, int drawn) { return drawn >= 1; });
  EXPECT_THAT(result.tokens, ElementsAre(2));
  EXPECT_THAT(result.path, ElementsAre(0));
  result = Walk(tree, choose, kNeverStop);
  EXPECT_THAT(result.tokens, ElementsAre(2, 3, 4, 5));
  EXPECT_THAT(result.path, ElementsAre(0, 1, 2, 3));
}

// Whatever the tree, walking it yields the target's own sequence; a bigger tree only yields more of
// it.
TEST(WalkTest, IsLosslessForAnyTree) {
  std::mt19937 rng(5);
  for (int round = 0; round < 2000; ++round) {
    const int vocab = 2 + static_cast<int>(rng() % 3);
    const DraftTree tree = RandomTree(rng, 1 + static_cast<int>(rng() % 20), vocab * 20);
    // The target's next token depends on the whole prefix.
    auto next = [&](const std::vector<int32_t>& prefix) {
      uint64_t hash = 1469598103934665603u + round;
      for (int32_t token : prefix) hash = (hash ^ static_cast<uint64_t>(token)) * 1099511628211u;
      return static_cast<int32_t>((hash >> 20) % (vocab * 20));
    };
    auto prefix_of = [&](int node) {
      std::vector<int32_t> prefix;
      for (; node >= 0; node = tree.parent[node]) prefix.insert(prefix.begin(), tree.token[node]);
      return prefix;
    };
    const WalkResult result = Walk(
        tree, [&](int node) { return next(prefix_of(node)); }, kNeverStop);
    std::vector<int32_t> truth = {tree.token[0]};
    for (int32_t token : result.tokens) {
      EXPECT_EQ(token, next(truth));
      truth.push_back(token);
    }
    ASSERT_EQ(result.path.size(), result.tokens.size());
    for (size_t r = 0; r < result.path.size(); ++r) {
      EXPECT_GE(result.path[r], static_cast<int32_t>(r));
      EXPECT_EQ(tree.token[result.path[r]], truth[r]);
      if (r > 0) {
        EXPECT_GT(result.path[r], result.path[r - 1]);
        EXPECT_EQ(tree.parent[result.path[r]], result.path[r - 1]);
      }
    }
  }
}

}  // namespace
}  // namespace coppice::speculation
