"""A small OPT drafts for a larger one; the text is the larger one's own.

    python examples/opt_pair.py
    python examples/opt_pair.py --target DIR --draft DIR --prompt "..." --gamma 5 --max-tokens 64 --temperature 0.7

Any pair of causal models that share a vocabulary, by hub id or local folder. Each drafted token x is kept if
p(x) >= q(x), else with probability p(x)/q(x), else replaced by a draw from max(0, p - q) normalised. With --seed the
text is the same with and without the draft model, and whatever --gamma is.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, try_to_load_from_cache
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.compat.functions import (
    GreedyProcessor,
    MultinomialProcessor,
    Processor,
    autoregressive_generate,
    speculative_generate_batch,
)
from outrider.core.errors import OutriderError
from outrider.models.transformers import TransformersModel


def main(argv: list[str] | None = None) -> int:
    try:
        run(arguments(argv))
    except OutriderError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A small model drafts for a larger one.")
    parser.add_argument("--target", default="facebook/opt-350m", help="hub id or folder (default: %(default)s)")
    parser.add_argument("--draft", default="facebook/opt-125m", help="hub id or folder (default: %(default)s)")
    parser.add_argument("--prompt", default="A good way to learn a language is")
    parser.add_argument("--gamma", type=int, default=5, help="tokens drafted per step (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    parser.add_argument("--seed", type=int)
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> None:
    tokenizer = load(AutoTokenizer, args.target)
    target = TransformersModel(load(AutoModelForCausalLM, args.target))
    draft = TransformersModel(load(AutoModelForCausalLM, args.draft))
    prompt = tokenizer(args.prompt).input_ids
    options: dict[str, Any] = {
        "logits_processor": processor(args.temperature),
        "max_gen_len": args.max_tokens,
        "eos_tokens_id": tokenizer.eos_token_id,
        "seed": args.seed,
    }
    begin = time.perf_counter()
    plain = autoregressive_generate(prompt, target, **options)
    middle = time.perf_counter()
    (ids,), (alpha,), (stats,) = speculative_generate_batch([prompt], draft, target, gamma=args.gamma, **options)
    end = time.perf_counter()

    print(args.prompt + tokenizer.decode(ids, skip_special_tokens=True))
    print()
    print(f"acceptance   {alpha:.0%} ({stats.accepted} of {stats.drafted} drafted tokens kept)")
    print(f"per step     {stats.tokens_per_step:.2f} tokens ({stats.tokens} in {stats.steps} steps)")
    print(f"plain        {middle - begin:.2f} s for {len(plain)} tokens")
    print(f"speculative  {end - middle:.2f} s for {len(ids)} tokens")
    if args.temperature == 0 or args.seed is not None:
        print(f"same text    {'yes' if ids == plain else 'no'}")


def load(kind: Any, name: str) -> Any:
    try:
        if not Path(name).is_dir() and not isinstance(try_to_load_from_cache(name, "config.json"), str):
            HfApi().model_info(name, timeout=10)  # fails at once where from_pretrained would try again for a minute
        return kind.from_pretrained(name)
    except Exception as error:  # which one depends on the HTTP library that the hub's client was built on
        reason = str(error).splitlines()[0].rstrip(":. ")
        raise OutriderError(f"cannot load {name}: {reason}; give a folder that holds the model, or go online") from None


def processor(temperature: float) -> Processor:
    return MultinomialProcessor(temperature) if temperature != 0 else GreedyProcessor()


if __name__ == "__main__":
    sys.exit(main())
