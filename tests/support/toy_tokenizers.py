"""Small tokenizers of every common kind, built with `tokenizers`, and the files that a core would send for them."""

import functools
import json

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
WORDS = ["the", "hello", "world", "cat", "Ünï", "漢字", "мир", "ing", "er", "a", "b", ".", ",", "'s", "!", "ab", "abc", "😀"]


@functools.cache
def byte_level() -> Tokenizer:
    """Byte-level BPE: 256 bytes and a few merged words, also a merge that ends in half a character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for word in [*WORDS, "é漢", "a😀"]:
        chars = byte_level.pre_tokenize_str(word)[0][0]
        pairs = [(chars[: end - 1], chars[end - 1]) for end in range(2, len(chars) + 1)]
        for left, right in [*pairs, ("Ġ", chars)]:
            if left + right not in vocab:
                vocab[left + right] = len(vocab)
                merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    _add_special(tokenizer)
    return tokenizer


def _add_special(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])


def _sentencepiece_vocab() -> list[str]:
    return ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁", *WORDS, *("▁" + w for w in WORDS), "▁▁", "▁▁▁", "the▁cat"]


@functools.cache
def llama2_like() -> Tokenizer:
    """SentencePiece BPE with byte fallback: Replace, ByteFallback, Fuse, Strip; adds BOS."""
    vocab = {t: i for i, t in enumerate(_sentencepiece_vocab() + sorted({c for w in WORDS for c in w} - set(WORDS)))}
    merges = []
    for word in list(vocab):
        for cut in range(1, len(word)):
            if not word.startswith("<") and word[:cut] in vocab and word[cut:] in vocab:
                merges.append((word[:cut], word[cut:]))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    _add_special(tokenizer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


@functools.cache
def gemma_like() -> Tokenizer:
    """The same without Strip: the first space is text."""
    tokenizer = Tokenizer.from_str(llama2_like().to_str())
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


@functools.cache
def unigram_metaspace() -> Tokenizer:
    """Unigram with Metaspace, as T5 has it."""
    vocab = [(t, -float(len(t) < 2) * 5 - i / 100) for i, t in enumerate(["<unk>", *_sentencepiece_vocab()[257:]])]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    _add_special(tokenizer)
    return tokenizer


@functools.cache
def wordpiece() -> Tokenizer:
    """BERT's kind: ## continues a word, spaces before punctuation are cleaned up."""
    vocab = {t: i for i, t in enumerate(["[UNK]", *WORDS, *("##" + w for w in WORDS), "'", "n't", "do not"])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    _add_special(tokenizer)
    return tokenizer


@functools.cache
def word_level() -> Tokenizer:
    """No decoder at all: words joined with spaces."""
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["<unk>", *WORDS])}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    _add_special(tokenizer)
    return tokenizer


@functools.cache
def bpe_suffix() -> Tokenizer:
    """GPT-1's kind, whose decoder looks at the next token: not local, so decoded by window."""
    vocab = {t: i for i, t in enumerate(["<unk>", *WORDS, *(w + "</w>" for w in WORDS)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    _add_special(tokenizer)
    return tokenizer


LOCAL = {
    "byte_level": byte_level,
    "llama2_like": llama2_like,
    "gemma_like": gemma_like,
    "unigram_metaspace": unigram_metaspace,
    "wordpiece": wordpiece,
    "word_level": word_level,
}

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def files(tokenizer: Tokenizer | None = None, **config: object) -> dict[str, bytes]:
    """What a core would send: tokenizer.json, tokenizer_config.json with a chat template, generation_config.json."""
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHATML, **config}
    return {
        "tokenizer.json": (tokenizer or byte_level()).to_str().encode(),
        "tokenizer_config.json": json.dumps(settings).encode(),
        "generation_config.json": b"{}",
    }
