"""The world's documents as token ids: training rows, held-out documents, and the prompts cut from documents."""

import dataclasses
import multiprocessing
import os
import zlib

import numpy as np

import tokenizer
import world

PROCESSES = min(16, os.cpu_count() or 1)


@dataclasses.dataclass
class Corpus:
    """Documents end to end, each closed by [EOS]; document i is ids[starts[i]:starts[i + 1]]."""

    ids: np.ndarray
    starts: np.ndarray
    categories: np.ndarray  # index into world.NAMES
    hashes: np.ndarray

    def __len__(self):
        return len(self.categories)

    def document(self, number):
        """Token ids of one document, [EOS] included."""
        return self.ids[self.starts[number]:self.starts[number + 1]]

    def select(self, numbers):
        """The documents `numbers`, in that order, as a corpus."""
        parts = [self.document(number) for number in numbers]
        starts = np.concatenate([[0], np.cumsum([len(part) for part in parts])])
        return Corpus(np.concatenate(parts), starts, self.categories[numbers], self.hashes[numbers])


def in_parallel(function, jobs, context=None):
    """[function(job) for job in jobs] over all cores."""
    if PROCESSES == 1 or len(jobs) == 1:
        return [function(job) for job in jobs]
    with multiprocessing.get_context(context or "fork").Pool(PROCESSES) as pool:
        return pool.map(function, jobs, chunksize=max(1, len(jobs) // (4 * PROCESSES)))


def _count(job):
    return tokenizer.count_pieces(text for _, text in world.documents(*job))


def train_tokenizer(folder, characters, shards):
    """Trains the tokenizer on documents of its own and writes it to `folder`."""
    counts = _count(("tokenizer-0", characters // shards))
    for part in in_parallel(_count, [("tokenizer-%d" % i, characters // shards) for i in range(1, shards)]):
        counts.update(part)
    tokenizer.write(folder, tokenizer.train(counts, tokenizer.FIRST_SPECIAL))


def _encode(job):
    folder, seed, characters = job
    encode = tokenizer.Tokenizer(folder).encode
    ids, lengths, categories, hashes = [], [], [], []
    for category, text in world.documents(seed, characters):
        document = np.array(encode(text) + [tokenizer.EOS], np.uint16)
        ids.append(document)
        lengths.append(len(document))
        categories.append(world.NAMES.index(category))
        data = text.encode()
        hashes.append(zlib.crc32(data) << 32 | zlib.adler32(data))
    return np.concatenate(ids), np.array(lengths), np.array(categories, np.int8), np.array(hashes, np.uint64)


def _build(folder, name, characters, shards):
    parts = in_parallel(_encode, [(folder, "%s-%d" % (name, i), characters // shards) for i in range(shards)])
    ids, lengths, categories, hashes = (np.concatenate(column) for column in zip(*parts))
    return Corpus(ids, np.concatenate([[0], np.cumsum(lengths)]), categories, hashes)


def build(folder, characters, shards):
    """(training corpus, held-out corpus of two hundredths of its size without any document that training has)."""
    training = _build(folder, "train", characters, shards)
    held_out = _build(folder, "held-out", max(characters // 50, 200_000), min(shards, 16))
    fresh = np.flatnonzero(~np.isin(held_out.hashes, training.hashes))
    _, first = np.unique(held_out.hashes[fresh], return_index=True)
    return training, held_out.select(fresh[np.sort(first)])


def pack(corpus, row, seed):
    """Rows of `row` tokens of shuffled documents. A row starts at a document's start; the document that does not fit
    is cut and its rest dropped."""
    order = np.random.RandomState(seed).permutation(len(corpus))
    rows = np.empty((len(corpus.ids) // row + 1, row), np.uint16)
    at = filled = 0
    for number in order:
        document = corpus.document(number)[:row - filled]
        rows[at, filled:filled + len(document)] = document
        filled += len(document)
        if filled == row:
            at, filled = at + 1, 0
            if at == len(rows):
                break
    return rows[:at]


def cut_prompt(corpus, number, random):
    """Length of a prompt cut from a document: a conversation up to one of its assistant turns, the generation prompt
    `<think></think>` or `<think>` included; other documents after a tenth to a half. 0 where none can be cut."""
    document = corpus.document(number)
    if world.NAMES[corpus.categories[number]] not in world.CONVERSATIONS:
        return max(3, int(len(document) * random.uniform(0.1, 0.5)))
    thoughts = np.flatnonzero(document == tokenizer.THINK)
    if not len(thoughts):
        return 0
    at = int(random.choice(thoughts))
    return at + (2 if document[at + 1] == tokenizer.END_THINK else 1)


def prompts_by_category(corpus, count, seed, longest=260):
    """Up to `count` prompts of each category, as a list of (category, ids)."""
    random = np.random.RandomState(seed)
    out = []
    for category in range(len(world.NAMES)):
        found = 0
        for number in random.permutation(np.flatnonzero(corpus.categories == category)):
            length = cut_prompt(corpus, number, random)
            if found < count and 0 < length <= longest:
                out.append((category, corpus.document(number)[:length].tolist()))
                found += 1
    return out
