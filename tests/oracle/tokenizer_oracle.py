#!/usr/bin/env python3
"""Token ids by PyPI tiktoken, to compare model/tokenizer.cc with.

  tokenizer_oracle.py golden MODEL_DIR OUT.json     remakes tests/goldens/tokenizer/demo.json
  tokenizer_oracle.py fuzz MODEL_DIR SEED COUNT     prints COUNT random texts with their ids, one JSON object a line

Needs: pip install tiktoken.  Exits with 77 where it is missing.
"""
import base64
import hashlib
import json
import pathlib
import random
import sys

try:
    import tiktoken
except ImportError:
    sys.stderr.write("tokenizer_oracle.py: PyPI tiktoken is not installed\n")
    sys.exit(77)

# Kimi's pre-tokenisation pattern, in the syntax of the engine that tiktoken uses.
UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join([
    r"[\p{Han}]+",
    rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]*[{LOWER}]+{SUFFIX}",
    rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]+[{LOWER}]*{SUFFIX}",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
])

SLICE_CHARS = 400_000
RUN_CHARS = 25_000


def load(model_dir):
    lines = (model_dir / "tiktoken.model").read_text().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}
    config = json.loads((model_dir / "config.json").read_text())
    vocab_size = config.get("text_config", config)["vocab_size"]
    added = json.loads((model_dir / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    special = {}
    for token in range(len(ranks), vocab_size):
        entry = added.get(str(token))
        special[entry["content"] if entry else f"<|reserved_token_{token}|>"] = token
    return tiktoken.Encoding("oracle", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)


def cuts(text):
    """The pieces into which the reference tokenizer cuts a long text before it applies the pattern."""
    for start in range(0, len(text), SLICE_CHARS):
        part = text[start:start + SLICE_CHARS]
        begin, run, space = 0, 0, part[0].isspace()
        for i, char in enumerate(part):
            if char.isspace() == space:
                run += 1
                if run > RUN_CHARS:
                    yield part[begin:i]
                    begin, run = i, 1
            else:
                space, run = char.isspace(), 1
        yield part[begin:]


def encode(encoding, text, special):
    ids = []
    for part in cuts(text):
        ids += encoding.encode(part, allowed_special="all") if special else encoding.encode_ordinary(part)
    return ids


TEXTS = [
    "",
    "The capital of France is Paris.",
    "“Hello,” 世界世世世界世界——I'm ChatGPT. CAN'T wait 'til 2026.世界世界",
    "中文ABC中文",
    "hello世界abc",
    "a  b   c\n\n  d \t",
    "12345678 9",
    "x=foo_bar(1,2);\r\n\r\n  return",
    "你好，world！ こんにちは",
    "〇々〆 〇一",
    "中文、中文。",
    "\n \n a",
    "it'ſ IT'S we'LL they'Ve I'D don’t",
    "e\u0301 \u0301x 日\u302a本 ǅungla ßſ ﬁ Ⅷ ² ½ ٣٤٥٦",
    "\u00a0\u1680\u2003\u2028\u2029\u202f\u205f\u3000x\u180ey\x85z\x1c\x1d\x0b\x0c",
    "👩‍👩‍👧‍👦🏽 e\u200dé\u00ad\ufeff",
    "한국어 가나다 ภาษาไทย हिन्दी العربية עברית ქართული",
    "def f(x):\n    return {'a': [1, 2.5e-3], \"b\": None}\n\n\n",
    "<|im_user|>user<|im_middle|>hi<|im_end|><|im_assistant|>assistant<|im_middle|><think></think>",
    "[BOS][EOS] <|im_end|x <|im_end|> <think>a</think>",
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"a\": 1}<|tool_call_end|>",
]

# [text, repetitions] pairs, joined: too long to be written out.
LONG = [
    [["a", 60_000]],
    [["ab ", 200_000]],
    [[" ", 50_001], ["x", 1]],
    [["世界", 30_000], [" \n", 25_001], ["!?", 13_000]],
    [["abc def, 12 世界\n", 40_000]],
    [["Z", 24_999], ["\x1c", 25_001], ["q", 2]],
]


def fingerprint(ids):
    value = 0
    for token in ids:
        value = (value * 1_000_003 + token + 1) % 2**64
    return f"{value:016x}"


def write_golden(model_dir, out):
    encoding = load(model_dir)
    golden = {
        "tiktoken_model_sha256": hashlib.sha256((model_dir / "tiktoken.model").read_bytes()).hexdigest(),
        "vocab_size": encoding.n_vocab,
        "texts": [{"text": text, "ids": encode(encoding, text, False), "ids_special": encode(encoding, text, True)}
                  for text in TEXTS],
        "long": [],
    }
    for parts in LONG:
        ids = encode(encoding, "".join(text * count for text, count in parts), False)
        golden["long"].append({"parts": parts, "count": len(ids), "fingerprint": fingerprint(ids)})
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(golden, ensure_ascii=True, separators=(",", ":")).replace('{"text"', '\n{"text"')
                   .replace('{"parts"', '\n{"parts"') + "\n")


ALPHABETS = [
    "abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "0123456789²½Ⅷ٣〇", " ", " \t\n\r", "\n\r",
    "\u00a0\u1680\u2003\u2028\u2029\u3000\x85\x1c\x0b\u180e", "世界中文々〆一", "ひらがなカタカナー", "、。，！？「」・", "'’sStTdDmMlLvVrReEſ",
    "!\"#$%&()*+,-./:;<=>?@[\\]^_`{|}~", "\u0301\u0308\u302a\u0e31\u093f", "éßñçÀÉøŁžǅǈ", "한글가나다", "ภาษาไทย", "हिन्दी",
    "ابجد", "🙂👩\u200d👧🏽\ufe0f", "<|im_end|><think>[EOS]",
]


def random_text(rng):
    length = rng.choice([3, 10, 40, 200])
    out = []
    while len(out) < length:
        alphabet = rng.choice(ALPHABETS)
        for _ in range(rng.choice([1, 1, 2, 3, 8])):
            out.append(rng.choice(alphabet))
        if rng.random() < 0.02:
            out.append(rng.choice(["<|im_end|>", "<think>", "</think>", "[EOS]", "I'm", "we've"]))
        if rng.random() < 0.01:
            out.append(rng.choice(alphabet) * rng.choice([100, 300]))
    return "".join(out)


def long_text(rng):
    """Beyond the 400,000 characters, and the runs of 25,000, at which the reference cuts."""
    out, length = [], 0
    while length < 410_000:
        piece = rng.choice([random_text(rng), rng.choice(rng.choice(ALPHABETS))])
        repeats = rng.choice([1, 1000, 24_999, 25_000, 25_001, 60_000]) // len(piece) + 1
        out.append(piece * repeats)
        length += len(piece) * repeats
    return "".join(out)


def fuzz(model_dir, seed, count):
    encoding = load(model_dir)
    rng = random.Random(seed)
    for i in range(count):
        text = long_text(rng) if i % 12_500 == 12_499 else random_text(rng)
        print(json.dumps({"text": text, "ids": encode(encoding, text, False), "ids_special": encode(encoding, text, True)}))


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[1] == "golden":
        write_golden(pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3]))
    elif len(sys.argv) == 5 and sys.argv[1] == "fuzz":
        fuzz(pathlib.Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    else:
        sys.exit(__doc__)
