// Mistakes users make, each answered by a sentence that names the culprit; nothing crashes, what
// runs keeps running.
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/integration/cluster.h"

namespace coppice::testing {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

std::string Read(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(in), {});
}

void Write(const fs::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

// A copy of the demo pair to break.
class BrokenModel : public ::testing::Test {
 protected:
  void SetUp() override {
    fs::copy("models/demo", model(), fs::copy_options::recursive);
    index_ = json::parse(Read(model() / "model.safetensors.index.json"));
  }
  fs::path model() const { return fs::path(directory_.path()) / "model"; }
  fs::path Shard(const std::string& tensor) const {
    return model() / index_.at("weight_map").at(tensor).get<std::string>();
  }
  // The header of a safetensors file, edited by `edit`, put back with its new length.
  void EditHeader(const fs::path& path, const std::function<void(json*)>& edit) {
    const std::string file = Read(path);
    uint64_t length = 0;
    std::memcpy(&length, file.data(), 8);
    json header = json::parse(file.substr(8, length));
    edit(&header);
    const std::string text = header.dump();
    const uint64_t new_length = text.size();
    Write(path, std::string(reinterpret_cast<const char*>(&new_length), 8) + text +
                    file.substr(8 + length));
  }
  // The verifier refuses to start: exit 1 and this in its output.
  void ExpectRefused(const ::testing::Matcher<const std::string&>& sentence) {
    const CommandResult result = RunCommand({Binary("coppice-verifier"), "--model", model(),
                                             "--listen", "127.0.0.1:0", "--device", "cpu"},
                                            seconds(30));
    EXPECT_EQ(result.exit_code, 1) << result.output;
    EXPECT_THAT(result.output, sentence);
  }

  static constexpr char kTensor[] = "language_model.model.layers.1.self_attn.o_proj.weight";
  TemporaryDirectory directory_;
  json index_;
};

TEST_F(BrokenModel, MissingDirectory) {
  fs::remove_all(model());
  ExpectRefused(HasSubstr(model().string()));
}

TEST_F(BrokenModel, MissingShard) {
  const fs::path shard = Shard(kTensor);
  fs::remove(shard);
  ExpectRefused(HasSubstr(shard.filename().string()));
}

TEST_F(BrokenModel, TruncatedShard) {
  const fs::path shard = Shard(kTensor);
  fs::resize_file(shard, fs::file_size(shard) - 1000);
  ExpectRefused(HasSubstr(shard.filename().string()));
}

TEST_F(BrokenModel, OversizedShard) {
  const fs::path shard = Shard(kTensor);
  fs::resize_file(shard, fs::file_size(shard) + 1000);
  ExpectRefused(HasSubstr(shard.filename().string()));
}

TEST_F(BrokenModel, WrongShape) {
  EditHeader(Shard(kTensor), [](json* header) {
    json& shape = (*header)[kTensor]["shape"];
    shape = json::array({shape[0].get<int>() / 2, shape[1].get<int>() * 2});
  });
  ExpectRefused(AllOf(HasSubstr(kTensor), HasSubstr("[128,512]"), HasSubstr("[256,256]")));
}

TEST_F(BrokenModel, WrongDtype) {
  EditHeader(Shard(kTensor), [](json* header) { (*header)[kTensor]["dtype"] = "F16"; });
  ExpectRefused(AllOf(HasSubstr(kTensor), HasSubstr("F16")));
}

TEST_F(BrokenModel, IndexNamesAnAbsentTensor) {
  index_["weight_map"]["language_model.model.layers.1.self_attn.ghost.weight"] =
      Shard(kTensor).filename().string();
  Write(model() / "model.safetensors.index.json", index_.dump());
  ExpectRefused(HasSubstr("ghost.weight"));
}

TEST_F(BrokenModel, MissingTensor) {
  const std::string shard = Shard(kTensor).filename().string();
  EditHeader(model() / shard, [](json* header) {
    json tensor = (*header)[kTensor];
    header->erase(kTensor);
    (*header)["language_model.unused"] = tensor;
  });
  index_["weight_map"].erase(kTensor);
  index_["weight_map"]["language_model.unused"] = shard;
  Write(model() / "model.safetensors.index.json", index_.dump());
  ExpectRefused(HasSubstr(kTensor));
}

TEST_F(BrokenModel, MalformedHeader) {
  const fs::path shard = Shard(kTensor);
  std::string file = Read(shard);
  file[9] = '}';
  Write(shard, file);
  ExpectRefused(AllOf(HasSubstr(shard.filename().string()), HasSubstr("header")));
}

TEST_F(BrokenModel, NonFiniteWeight) {
  const fs::path shard = Shard(kTensor);
  std::string file = Read(shard);
  uint64_t length = 0;
  std::memcpy(&length, file.data(), 8);
  const json header = json::parse(file.substr(8, length));
  const size_t at = 8 + length + header.at(kTensor).at("data_offsets")[0].get<size_t>() + 20;
  file[at] = '\xc0';
  file[at + 1] = '\x7f';  // bf16 NaN
  Write(shard, file);
  ExpectRefused(AllOf(HasSubstr(kTensor), HasSubstr("finite")));
}

TEST_F(BrokenModel, MissingConfigKey) {
  json config = json::parse(Read(model() / "config.json"));
  config["text_config"].erase("kv_lora_rank");
  Write(model() / "config.json", config.dump());
  ExpectRefused(AllOf(HasSubstr("config.json"), HasSubstr("kv_lora_rank")));
}

TEST_F(BrokenModel, DrafterForAnotherTarget) {
  json config = json::parse(Read(model() / "drafter/config.json"));
  config["num_target_layers"] = 61;
  config["dflash_config"]["num_target_layers"] = 61;
  Write(model() / "drafter/config.json", config.dump());
  ExpectRefused(AllOf(HasSubstr("drafter"), HasSubstr("61")));
  const CommandResult result =
      RunCommand({Binary("coppice-drafter"), "--drafter", model() / "drafter", "--model", model(),
                  "--listen", "127.0.0.1:0", "--device", "cpu"},
                 seconds(30));
  EXPECT_EQ(result.exit_code, 1) << result.output;
  EXPECT_THAT(result.output, HasSubstr("61"));
}

TEST(Flags, UnknownFlagsAndValuesAreNamed) {
  const std::vector<std::vector<std::string>> commands = {
      {"coppice-router", "--model", "models/demo", "--verifier", "127.0.0.1:1"},
      {"coppice-drafter", "--model", "models/demo", "--drafter", "models/demo/drafter"},
      {"coppice-verifier", "--model", "models/demo"},
      {"coppice", "up", "--model", "models/demo"}};
  for (const std::vector<std::string>& command : commands) {
    const std::string& binary = command[0];
    std::vector<std::string> argv = command;
    argv[0] = Binary(binary);
    argv.push_back("--no-such-flag");
    const CommandResult result = RunCommand(argv);
    EXPECT_EQ(result.exit_code, 2) << binary << result.output;
    EXPECT_THAT(result.output, HasSubstr("no-such-flag"));
    const CommandResult version = RunCommand({Binary(binary), "--version"});
    EXPECT_EQ(version.exit_code, 0);
    EXPECT_THAT(version.output, HasSubstr("0.1.0"));
  }
  const CommandResult device =
      RunCommand({Binary("coppice-verifier"), "--model", "models/demo", "--device", "tpu"});
  EXPECT_EQ(device.exit_code, 2) << device.output;
  EXPECT_THAT(device.output, AllOf(HasSubstr("device"), HasSubstr("tpu"), HasSubstr("cpu")));
  const CommandResult tp = RunCommand({Binary("coppice-verifier"), "--model", "models/demo",
                                       "--device", "cpu", "--tp", "3", "--listen", "127.0.0.1:0"});
  EXPECT_NE(tp.exit_code, 0) << tp.output;
  EXPECT_THAT(tp.output, HasSubstr("3"));
  const CommandResult mode =
      RunCommand({Binary("coppice"), "generate", "hello", "--speculation", "forest"});
  EXPECT_EQ(mode.exit_code, 2) << mode.output;
  EXPECT_THAT(mode.output, AllOf(HasSubstr("forest"), HasSubstr("tree")));
  const CommandResult timeout =
      RunCommand({Binary("coppice"), "generate", "hello", "--timeout", "-3"});
  EXPECT_EQ(timeout.exit_code, 2) << timeout.output;
  EXPECT_THAT(timeout.output, AllOf(HasSubstr("--timeout"), HasSubstr("-3")));
  const CommandResult verifiers = RunCommand(
      {Binary("coppice"), "up", "--model", "no/such/model", "--verifiers", "2", "--detach"});
  EXPECT_EQ(verifiers.exit_code, 2) << verifiers.output;
  EXPECT_THAT(verifiers.output, AllOf(HasSubstr("--verifiers"), HasSubstr("one verifier")));
}

TEST(Flags, ATakenPortIsToldBeforeTheModelIsRead) {
  const int port = FreePort();
  const std::string address = "127.0.0.1:" + std::to_string(port);
  TemporaryDirectory logs;
  Process first({Binary("coppice-drafter"), "--model", "models/demo", "--drafter",
                 "models/demo/drafter", "--listen", address},
                logs.path() + "/first");
  ASSERT_TRUE(Eventually([&] { return first.Output().find("listens on") != std::string::npos; },
                         seconds(60)));
  for (const std::string binary : {"coppice-drafter", "coppice-verifier"}) {
    const CommandResult second = RunCommand({Binary(binary), "--model", "no/such/model",
                                             "--drafter", "no/such/drafter", "--listen", address},
                                            seconds(30));
    EXPECT_EQ(second.exit_code, 1) << second.output;
    EXPECT_THAT(second.output, AllOf(HasSubstr(address), HasSubstr("in use"))) << binary;
  }
}

TEST(Flags, NoClusterIsSaid) {
  TemporaryDirectory state;
  const CommandResult result =
      RunCommand({Binary("coppice"), "generate", "hello", "--state", state.path()});
  EXPECT_EQ(result.exit_code, 1) << result.output;
  EXPECT_THAT(result.output, HasSubstr("coppice up"));
}

class Requests : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    cluster_ = new Cluster({});
    ASSERT_TRUE(cluster_->Start());
  }
  static void TearDownTestSuite() {
    delete cluster_;
    cluster_ = nullptr;
  }
  static v1::GenerateRequest Good() {
    v1::GenerateRequest request;
    request.set_text("The capital of France is");
    request.set_max_tokens(8);
    return request;
  }
  // Refused as the caller's mistake, with this sentence; the next good request is served.
  static void ExpectInvalid(const v1::GenerateRequest& request,
                            const ::testing::Matcher<const std::string&>& sentence) {
    const Generation got = cluster_->Generate(request);
    EXPECT_EQ(got.status.error_code(), grpc::StatusCode::INVALID_ARGUMENT)
        << got.status.error_message();
    EXPECT_THAT(got.status.error_message(), sentence);
    EXPECT_TRUE(got.ids.empty());
    EXPECT_TRUE(cluster_->Generate(Good()).status.ok());
  }
  static Cluster* cluster_;
};
Cluster* Requests::cluster_ = nullptr;

TEST_F(Requests, EmptyPrompt) {
  v1::GenerateRequest request = Good();
  request.set_text("");
  ExpectInvalid(request, HasSubstr("empty"));
  request.mutable_token_ids();
  ExpectInvalid(request, HasSubstr("empty"));
  v1::GenerateRequest none;
  ExpectInvalid(none, HasSubstr("prompt"));
}

TEST_F(Requests, PromptIdOutOfRange) {
  v1::GenerateRequest request = Good();
  request.mutable_token_ids()->add_ids(5);
  request.mutable_token_ids()->add_ids(4096);
  ExpectInvalid(request, AllOf(HasSubstr("4096"), HasSubstr("1")));
  request.mutable_token_ids()->set_ids(1, 4294967295u);
  ExpectInvalid(request, HasSubstr("4294967295"));
}

TEST_F(Requests, TooLong) {
  v1::GenerateRequest request = Good();
  request.set_max_tokens(4096);
  ExpectInvalid(request, AllOf(HasSubstr("max_tokens"), HasSubstr("4096")));
  request.set_max_tokens(0);
  ExpectInvalid(request, HasSubstr("max_tokens"));
  request = Good();
  for (int i = 0; i < 5000; ++i) request.mutable_token_ids()->add_ids(7);
  ExpectInvalid(request, AllOf(HasSubstr("5000"), HasSubstr("4096")));
}

TEST_F(Requests, Sampling) {
  v1::GenerateRequest request = Good();
  for (float bad : {-0.5f, std::nanf(""), std::numeric_limits<float>::infinity()}) {
    request.set_temperature(bad);
    ExpectInvalid(request, HasSubstr("temperature"));
  }
  request = Good();
  for (float bad : {0.0f, -1.0f, 1.5f, std::nanf("")}) {
    request.set_top_p(bad);
    ExpectInvalid(request, HasSubstr("top_p"));
  }
  request = Good();
  request.set_logprobs(1000);
  ExpectInvalid(request, HasSubstr("logprobs"));
  request = Good();
  request.add_stop_token_ids(99999);
  ExpectInvalid(request, HasSubstr("99999"));
  request = Good();
  request.add_stop("");
  ExpectInvalid(request, HasSubstr("stop"));
}

TEST_F(Requests, Speculation) {
  v1::GenerateRequest request = Good();
  request.set_speculation(static_cast<v1::SpeculationMode>(77));
  ExpectInvalid(request, HasSubstr("speculation"));
  request = Good();
  request.set_speculation(v1::SPECULATION_TREE);
  for (uint32_t bad : {0u, 65u}) {
    request.set_tree_nodes(bad);
    ExpectInvalid(request, HasSubstr("tree_nodes"));
  }
}

TEST_F(Requests, ChatRoles) {
  v1::GenerateRequest request = Good();
  auto* message = request.mutable_chat()->add_messages();
  message->set_role("wizard");
  message->set_content("hello");
  ExpectInvalid(request, HasSubstr("wizard"));
}

TEST_F(Requests, Resume) {
  v1::GenerateRequest request = Good();
  request.mutable_resume()->set_seed(1);
  for (int i = 0; i < 9; ++i) request.mutable_resume()->add_token_ids(5);
  ExpectInvalid(request, HasSubstr("resume"));
  request = Good();
  request.mutable_resume()->add_token_ids(70000);
  ExpectInvalid(request, HasSubstr("70000"));
}

TEST_F(Requests, PortInUse) {
  for (const auto& [binary, address] :
       {std::pair<std::string, std::string>{"coppice-verifier", cluster_->verifier_address()},
        {"coppice-router", cluster_->router_address()},
        {"coppice-drafter", cluster_->drafter_address()}}) {
    std::vector<std::string> argv = {Binary(binary), "--model", "models/demo", "--listen", address};
    if (binary == "coppice-drafter") argv.insert(argv.end(), {"--drafter", "models/demo/drafter"});
    if (binary == "coppice-router")
      argv.insert(argv.end(), {"--verifier", cluster_->verifier_address()});
    const CommandResult result = RunCommand(argv, seconds(30));
    EXPECT_EQ(result.exit_code, 1) << result.output;
    EXPECT_THAT(result.output, AllOf(HasSubstr(address), HasSubstr("in use"))) << binary;
  }
  EXPECT_TRUE(cluster_->Generate(Good()).status.ok());
}

}  // namespace
}  // namespace coppice::testing
