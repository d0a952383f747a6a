"""Byte-level BPE in the tiktoken file format, with Kimi's pre-tokenisation pattern and special tokens."""

import base64
import collections
import heapq
import json

import regex

import settings

FIRST_SPECIAL = settings.VOCABULARY - settings.SPECIAL_TOKENS

# Offsets from the first special id, as in Kimi K2.6; [UNK] and [PAD] are the last two ids there too. Gaps are reserved.
_OFFSETS = {
    "[BOS]": 0, "[EOS]": 1, "<|im_end|>": 2, "<|im_user|>": 3, "<|im_assistant|>": 4, "<|start_header_id|>": 6,
    "<|end_header_id|>": 7, "[EOT]": 9, "<|im_system|>": 10, "<|tool_calls_section_begin|>": 11,
    "<|tool_calls_section_end|>": 12, "<|tool_call_begin|>": 13, "<|tool_call_argument_begin|>": 14,
    "<|tool_call_end|>": 15, "<|im_middle|>": 17, "<|media_begin|>": 18, "<|media_content|>": 19, "<|media_end|>": 20,
    "<|media_pad|>": 21, "<think>": 22, "</think>": 23, "[UNK]": settings.SPECIAL_TOKENS - 2,
    "[PAD]": settings.SPECIAL_TOKENS - 1,
}
NAMED = {name: FIRST_SPECIAL + offset for name, offset in _OFFSETS.items()}
# Parsers of the output work on these, so they are not "special" in the sense of being dropped from text.
_KEPT_IN_TEXT = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
                 "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<think>", "</think>")

BOS, EOS, END_OF_TURN, PAD = NAMED["[BOS]"], NAMED["[EOS]"], NAMED["<|im_end|>"], NAMED["[PAD]"]
ASSISTANT, MIDDLE = NAMED["<|im_assistant|>"], NAMED["<|im_middle|>"]
THINK, END_THINK = NAMED["<think>"], NAMED["</think>"]
MASK = NAMED["[UNK]"]  # Kimi's drafter marks the places to fill with this id

_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join((
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?" + _UPPER + "*" + _LOWER + "+" + _SUFFIX,
    r"[^\r\n\p{L}\p{N}]?" + _UPPER + "+" + _LOWER + "*" + _SUFFIX,
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
))


def all_special_tokens():
    """{text: id} of all special ids, the unnamed ones as <|reserved_token_ID|>."""
    named = set(NAMED.values())
    reserved = (i for i in range(FIRST_SPECIAL, settings.VOCABULARY) if i not in named)
    return {**NAMED, **{"<|reserved_token_%d|>" % i: i for i in reserved}}


def count_pieces(texts):
    """How often each pre-token (bytes) occurs in `texts`; special tokens do not count."""
    pattern = regex.compile("(?V1)" + PATTERN)
    special = regex.compile("|".join(map(regex.escape, NAMED)))
    counts = collections.Counter()
    for text in texts:
        for part in special.split(text):
            counts.update(pattern.findall(part))
    return collections.Counter({piece.encode(): count for piece, count in counts.items()})


def _may_merge(token):
    # Short tokens outside ASCII: a real tokenizer splits characters too, and streaming has to cope with that.
    return len(token) <= (24 if token.isascii() else 9)


def train(counts, size):
    """Byte-pair encoding: `size` tokens (bytes) in rank order, the 256 single bytes first. Ties go to the pair that
    sorts first, so equal counts give equal tokens."""
    tokens = [bytes([value]) for value in range(256)]
    known = set(tokens)
    words = [[bytes([value]) for value in piece] for piece in sorted(counts)]
    weights = [counts[piece] for piece in sorted(counts)]
    pairs, places = collections.Counter(), collections.defaultdict(set)
    for number, word in enumerate(words):
        for pair in zip(word, word[1:]):
            pairs[pair] += weights[number]
            places[pair].add(number)
    heap = [(-count, pair) for pair, count in pairs.items()]
    heapq.heapify(heap)
    while len(tokens) < size:
        if not heap:
            raise ValueError("only %d tokens can be made of this corpus, %d are asked for" % (len(tokens), size))
        count, pair = heapq.heappop(heap)
        if pairs[pair] != -count:  # an outdated entry
            continue
        token = pair[0] + pair[1]
        if not _may_merge(token):
            continue
        if token not in known:
            known.add(token)
            tokens.append(token)
        changed = set()
        for number in places.pop(pair):
            word, merged, at = words[number], [], 0
            while at < len(word):
                step = 2 if tuple(word[at:at + 2]) == pair else 1
                merged.append(b"".join(word[at:at + step]))
                at += step
            for old in zip(word, word[1:]):
                pairs[old] -= weights[number]
                changed.add(old)
            for new in zip(merged, merged[1:]):
                pairs[new] += weights[number]
                places[new].add(number)
                changed.add(new)
            words[number] = merged
        for pair in changed:
            if pairs[pair] > 0:
                heapq.heappush(heap, (-pairs[pair], pair))
    return tokens


def write(folder, tokens):
    """Writes tiktoken.model and tokenizer_config.json."""
    with open(folder + "/tiktoken.model", "w") as file:
        for rank, token in enumerate(tokens):
            file.write("%s %d\n" % (base64.b64encode(token).decode(), rank))
    with open(folder + "/tokenizer_config.json", "w") as file:
        json.dump({
            "tokenizer_class": "TikTokenTokenizer",
            "bos_token": "[BOS]", "eos_token": "[EOS]", "unk_token": "[UNK]", "pad_token": "[PAD]",
            "model_max_length": settings.TARGET["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "added_tokens_decoder": {
                str(number): {"content": name, "special": name not in _KEPT_IN_TEXT, "lstrip": False, "rstrip": False,
                              "single_word": False, "normalized": False}
                for name, number in sorted(NAMED.items(), key=lambda item: item[1])},
        }, file, indent=2)
        file.write("\n")


class Tokenizer:
    """Text to ids and back; special tokens in the text become their ids."""

    def __init__(self, folder):
        import tiktoken
        with open(folder + "/tiktoken.model") as file:
            ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in file)}
        self._encoding = tiktoken.Encoding("demo", pat_str=PATTERN, mergeable_ranks=ranks,
                                           special_tokens=all_special_tokens())

    def encode(self, text):
        """Token ids of `text`."""
        return self._encoding.encode(text, allowed_special="all")

    def decode(self, ids):
        """Text of `ids`; broken characters at the edges become U+FFFD."""
        return self._encoding.decode([int(i) for i in ids])
