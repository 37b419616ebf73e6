"""Which part of a drafter's tokens is accepted, by how drafts are drawn and verified: the reason for the engine's way.

    python benchmarks/acceptance.py

The target is the bundled model. The drafter is the same model with normal noise of a given size (*error*) on each logit, drawn
anew for each context. Three ways are compared, at the same contexts and for one draft in each:

shared     the engine's: the drafter and the target draw by the same sampler with the same noise, which depends on seed and
           position alone (kernels/sampling/sampler_cpu.py); a draft is accepted if it is what the target draws. Measured,
           --draws seeds a context.
rejection  the drafter draws with noise of its own, and a draft is accepted with probability min(1, p / q): sum of min(p, q).
           No way of drawing from p accepts more drafts from q. Computed.
greedy     the drafter's most likely token, accepted as often as the target draws it: p of that token, what vLLM does by
           default. Computed.

Contexts are what the model itself writes at the temperature: answers to questions of tiny_data.py, and text from nothing, the
end token forbidden. Questions leave little open, so most drafts are right in any way; text from nothing leaves more. Biased in
that a real drafter errs where the target is unsure too, and its errors at neighboring positions are alike.
Prints a table and a last line `RESULT {json}`.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from tiny_data import SCORED, benchmark_items
from transformers import AutoModelForCausalLM, AutoTokenizer

from quire.ipc.step.sections import SLOT
from quire.kernels.sampling.sampler_cpu import race

BUNDLED = Path(__file__).parents[1] / "enginecore/loading/bundled"
TEMPERATURES, ERRORS = (0.7, 1.0), (0.5, 1.0, 2.0)
ROWS = 2048  # of logits at a time


class Target:
    def __init__(self, folder: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def contexts(self, prompts: list[list[int]], temperature: float, num_tokens: int, ends: bool, seed: int) -> np.ndarray:
        """float32 [contexts, V]: the logits behind each token that the model adds to the prompts, up to num_tokens to each."""
        torch.manual_seed(seed)
        found, stops = [], self.model.generation_config.eos_token_id
        for ids in prompts:
            given = torch.tensor([ids])
            options = {} if ends else {"suppress_tokens": [stops] if isinstance(stops, int) else stops}
            with torch.inference_mode():
                out = self.model.generate(
                    given,
                    attention_mask=torch.ones_like(given),
                    max_new_tokens=num_tokens,
                    do_sample=True,
                    temperature=temperature,
                    top_k=0,
                    top_p=1.0,
                    pad_token_id=self.tokenizer.pad_token_id,
                    **options,
                )
                logits = self.model(out[:, :-1]).logits[0, len(ids) - 1 :].float()
            found.append(logits.numpy())
        return np.concatenate(found)

    def questions(self, count: int) -> list[list[int]]:
        items = [item for task in SCORED for item in benchmark_items(task, -(-count // len(SCORED)))]
        messages = [[*item.history, {"role": "user", "content": item.question}] for item in items[:count]]
        texts = [self.tokenizer.apply_chat_template(each, add_generation_prompt=True, tokenize=False) for each in messages]
        return [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def draws(logits: np.ndarray, temperature: float, num_draws: int) -> np.ndarray:
    """int64 [contexts, num_draws]: tokens by the engine's sampler; draw d of context c has seed d and position c."""
    params = np.zeros((len(logits), SLOT.width), np.int32)
    params.view(np.float32)[:, SLOT.at["temperature"]] = temperature
    found = np.empty((len(logits), num_draws), np.int64)
    for seed in range(num_draws):
        params[:, SLOT.at["seed"]] = seed
        for begin in range(0, len(logits), ROWS):
            end = min(begin + ROWS, len(logits))
            found[begin:end, seed] = race(logits[begin:end], params[begin:end], list(range(begin, end)))[0]
    return found


def probabilities(logits: np.ndarray, temperature: float) -> np.ndarray:
    return torch.from_numpy(logits).double().div(temperature).softmax(1).numpy()


def acceptance(target: np.ndarray, drafter: np.ndarray, temperature: float, target_draws: np.ndarray) -> dict[str, float]:
    """The part of drafts that is accepted in each way, over all contexts. target, drafter: logits [contexts, V]."""
    p, q = probabilities(target, temperature), probabilities(drafter, temperature)
    return {
        "shared": float((draws(drafter, temperature, target_draws.shape[1]) == target_draws).mean()),
        "rejection": float(np.minimum(p, q).sum(1).mean()),
        "greedy": float(p[np.arange(len(p)), q.argmax(1)].mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=str(BUNDLED), help="folder of the target (default: the bundled model)")
    parser.add_argument("--draws", type=int, default=32, help="seeds a context (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=44, help="questions, and a quarter as many texts (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of an answer or a text (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    target, found = Target(args.model), []
    start = target.tokenizer.bos_token_id or 0
    kinds = {"answers": (target.questions(args.prompts), True), "text": ([[start]] * -(-args.prompts // 4), False)}
    print("temperature  contexts          error  shared  rejection  greedy  shared/rejection  greedy/rejection")
    for temperature in TEMPERATURES:
        for kind, (prompts, ends) in kinds.items():
            logits = target.contexts(prompts, temperature, args.tokens, ends, args.seed)
            of_target, rng = draws(logits, temperature, args.draws), np.random.default_rng(args.seed)
            for error in ERRORS:
                drafter = logits + error * rng.standard_normal(logits.shape, np.float32)
                row = acceptance(logits, drafter, temperature, of_target)
                ratios = {f"{way}_of_rejection": row[way] / row["rejection"] for way in ("shared", "greedy")}
                found.append(
                    {"temperature": temperature, "contexts": kind, "num": len(logits), "error": error, **row, **ratios}
                )
                print(
                    f"{temperature:<12} {kind:<8} {len(logits):>6}  {error:>6}  {row['shared']:6.3f}  {row['rejection']:9.3f}  "
                    f"{row['greedy']:6.3f}  {ratios['shared_of_rejection']:16.3f}  {ratios['greedy_of_rejection']:16.3f}"
                )
    print("RESULT " + json.dumps({"model": Path(args.model).name, "draws": args.draws, "rows": found}))


if __name__ == "__main__":
    main()
