"""Measures how many fresh prompts a model answers exactly right, greedily, with transformers as the engine.

    python -m scripts.evaluate_embedded_model

No prompt here has arguments that training saw (`benchmarks.skills.is_held_out`). An answer is right when its text is
exactly right and the model ended it by itself. Needs transformers (a development dependency).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoTokenizer, LlamaForCausalLM

from benchmarks.skills import SKILLS, Example, fresh_prompts

FOLDER = Path(__file__).parent.parent / "backend" / "embedded"
MAX_NEW_TOKENS = 1500


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model wrote, and whether it ended by an end token of its own."""

    text: str
    ended: bool


Engine = Callable[[Sequence[str]], list[Answer]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=FOLDER, help="Hugging Face directory (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=200, help="fresh prompts a skill (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=7, help="seed of the prompts (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", help="dtype to compute in (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="threads torch may use (default: %(default)s)")
    parser.add_argument("--show-wrong", action="store_true", help="print the wrong answers")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    engine = transformers_engine(options.model, getattr(torch, options.dtype))
    skills = (*SKILLS, "repeat_unseen")
    wrong = {skill: wrong_answers(engine, skill, options.prompts, options.seed) for skill in skills}
    print_table(wrong, options.prompts)
    if options.show_wrong:
        print_wrong(wrong)


def transformers_engine(folder: Path, dtype: torch.dtype, batch_size: int = 50) -> Engine:
    """Greedy answers to single-turn chats, in left-padded batches."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    model.eval()

    def answer_batch(prompts: Sequence[str]) -> list[Answer]:
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        inputs = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        outputs = model.generate(**inputs, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
        answers = outputs[:, inputs["input_ids"].shape[1] :]  # [batch, num_new_tokens]
        return [
            Answer(tokenizer.decode(row, skip_special_tokens=True), bool((row == tokenizer.eos_token_id).any()))
            for row in answers
        ]

    def answer(prompts: Sequence[str]) -> list[Answer]:
        batches = (prompts[start : start + batch_size] for start in range(0, len(prompts), batch_size))
        return [answer for batch in batches for answer in answer_batch(batch)]

    return answer


def wrong_answers(engine: Engine, skill: str, num_prompts: int, seed: int) -> list[tuple[Example, Answer]]:
    """The fresh prompts of a skill that the engine got wrong; short expected answers run together."""
    examples = sorted(fresh_prompts(num_prompts, seed, (skill,)), key=lambda example: len(example.answer))
    answers = engine([example.prompt for example in tqdm(examples, desc=skill, leave=False)])
    pairs = zip(examples, answers, strict=True)
    return [(example, answer) for example, answer in pairs if not example.is_right(answer.text, ended=answer.ended)]


def print_table(wrong: dict[str, list[tuple[Example, Answer]]], num_prompts: int) -> None:
    """A markdown table; the total leaves out what was never trained."""
    print("| skill | right | of |\n|---|---|---|")
    for skill, pairs in wrong.items():
        print(f"| {skill} | {100 * (1 - len(pairs) / num_prompts):.1f} % | {num_prompts} |")
    num_all = num_prompts * len(SKILLS)
    num_wrong = sum(len(wrong[skill]) for skill in SKILLS)
    print(f"| all but repeat_unseen | {100 * (1 - num_wrong / num_all):.1f} % | {num_all} |")


def print_wrong(wrong: dict[str, list[tuple[Example, Answer]]]) -> None:
    for skill, pairs in wrong.items():
        for example, answer in pairs:
            print(f"\n{skill}: {example.prompt}\n  expected {example.answer}\n  answered {answer.text}")


if __name__ == "__main__":
    main()
