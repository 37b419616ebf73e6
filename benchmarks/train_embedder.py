"""Trains the tiny embedder that ships inside Quire: a BERT of 1M parameters and its tokenizer, in minutes on one core.

    python benchmarks/train_tiny.py --embed --minutes 14

Sentences of one meaning, in other words, are drawn together and all others of the batch apart (InfoNCE, arXiv:1807.03748); half
of a batch's events differ from another one in a part or two. Words are split at random into smaller pieces (BPE dropout,
arXiv:1910.13267), so that words that training has not seen are read by their letters. The folder has sentence-transformers'
files: mean of the tokens, norm. Scores are of sentences in templates and with words that training has not seen
(embed_data.py), beside those of a bag of words.
"""

import json
import random
import time
from pathlib import Path

import embed_data
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertModel

FOLDER = Path(__file__).resolve().parent.parent / "enginecore" / "loading" / "bundled_embedder"
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
POSITIONS, VOCABULARY, PAIRS, TEMPERATURE, DROPOUT = 512, 3000, 128, 0.05, 0.1
MAX_BYTES = 4_000_000


def build_tokenizer(seed: int) -> Tokenizer:
    """Byte-level BPE of lower-case text, without dropout."""
    rng = random.Random(f"tokenizer {seed}")
    texts = [text for _ in range(20_000) for text in embed_data.pair(rng, embed_data.event(rng))]
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    ids = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]", ids)
    return tokenizer


def with_dropout(tokenizer: Tokenizer) -> Tokenizer:
    state = json.loads(tokenizer.to_str())
    state["model"]["dropout"] = DROPOUT
    return Tokenizer.from_str(json.dumps(state))


def vectors(model: BertModel, tokenizer: Tokenizer, texts: list[str]) -> torch.Tensor:
    """[N, H] of length 1."""
    rows = [encoding.ids[:POSITIONS] for encoding in tokenizer.encode_batch(texts)]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = (torch.arange(longest) < torch.tensor([len(row) for row in rows])[:, None]).long()
    states = model(ids, attention_mask=mask).last_hidden_state * mask[..., None]
    return torch.nn.functional.normalize(states.sum(1) / mask.sum(1, keepdim=True), dim=-1)


def batch(rng: random.Random) -> tuple[list[str], list[str]]:
    events = [embed_data.event(rng) for _ in range(PAIRS // 2)]
    events += [embed_data.similar(rng, each) for each in events]
    pairs = [embed_data.pair(rng, each) for each in events]
    return [first for first, _ in pairs], [second for _, second in pairs]


def train(model: BertModel, tokenizer: Tokenizer, args, deadline: float, log) -> int:
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01)
    rng, noisy = random.Random(f"embedder {args.seed}"), with_dropout(tokenizer)
    began, step = time.monotonic(), 0
    while (now := time.monotonic()) < deadline:
        left = (deadline - now) / (deadline - began)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1, (step + 1) / 100) * min(1, left / 0.6)
        first, second = batch(rng)
        both = vectors(model, noisy if rng.random() < 0.5 else tokenizer, first + second)
        scores = both[:PAIRS] @ both[PAIRS:].T / TEMPERATURE
        at = torch.arange(PAIRS)
        loss = (torch.nn.functional.cross_entropy(scores, at) + torch.nn.functional.cross_entropy(scores.T, at)) / 2
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0:
            log(f"step {step:5d}  loss {loss.item():.3f}  left {deadline - now:.0f} s")
        step += 1
    return step


@torch.inference_mode()
def score(model: BertModel, tokenizer: Tokenizer, tries: int = 10) -> dict[str, float]:
    """The share of paraphrases that find their sentence among 100; and that of a bag of words."""
    right, words = 0.0, 0.0
    for i in range(tries):
        pairs = embed_data.scored_pairs(random.Random(f"score {i}"), 100)
        first, second = (vectors(model, tokenizer, list(side)) for side in zip(*pairs, strict=True))
        right += ((second @ first.T).argmax(1) == torch.arange(100)).float().mean().item() / tries
        words += embed_data.bag_of_words_score(pairs) / tries
    return {"embedder": round(right, 4), "bag_of_words": round(words, 4)}


def write_folder(model: BertModel, tokenizer: Tokenizer, out: Path) -> None:
    """Write the folder, with weights in bf16. Raises if it exceeds MAX_BYTES."""
    (out / "1_Pooling").mkdir(parents=True, exist_ok=True)
    fields = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act"]
    fields += ["max_position_embeddings", "type_vocab_size", "layer_norm_eps", "pad_token_id"]
    config = {"architectures": ["BertModel"], "model_type": "bert", "dtype": "bfloat16", "position_embedding_type": "absolute"}
    write_json(out / "config.json", config | {name: getattr(model.config, name) for name in fields})
    kind = "sentence_transformers.models."
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    write_json(
        out / "modules.json",
        [{"idx": i, "name": str(i), "path": path, "type": f"{kind}{name}"} for i, (path, name) in enumerate(modules)],
    )
    pooling = {"word_embedding_dimension": model.config.hidden_size, "pooling_mode_mean_tokens": True}
    write_json(out / "1_Pooling" / "config.json", pooling)
    write_json(out / "sentence_bert_config.json", {"max_seq_length": POSITIONS, "do_lower_case": False})
    write_json(out / "config_sentence_transformers.json", {"prompts": {}, "similarity_fn_name": "cosine"})
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": POSITIONS}
    write_json(out / "tokenizer_config.json", kind | names)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    weights = {name: weight.bfloat16().contiguous() for name, weight in model.state_dict().items()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    total = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    assert total <= MAX_BYTES, f"{out} has {total} bytes"


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def main(args, log) -> None:
    """args: seed, minutes, lr, out (None: the bundled folder)."""
    deadline = time.monotonic() + 60 * args.minutes
    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer(args.seed)
    shape = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 384}
    more = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": POSITIONS}
    size = {"vocab_size": tokenizer.get_vocab_size(), "pad_token_id": 0, "type_vocab_size": 1}
    model = BertModel(BertConfig(**shape, **more, **size), add_pooling_layer=False)
    steps = train(model, tokenizer, args, deadline, log)
    model.train(False)
    out = args.out or FOLDER
    write_folder(model, tokenizer, out)
    total = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    print("RESULT", json.dumps({"steps": steps, "bytes": total, "found": score(model, tokenizer)}))
