"""Measures how many fresh prompts a model answers exactly right, greedily, with transformers as the engine.

    python -m scripts.evaluate_embedded_model

No prompt here has arguments that training saw (`skills.is_held_out`). An answer is right when its text is
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

from labs.benchmarks.skills import SKILLS, Example, fresh_prompts
from labs.benchmarks.tool_skill.tools import Tool
from labs.benchmarks.tool_skill.turns import TOOL_SKILLS, ToolTurn, fresh_tool_turns

FOLDER = Path(__file__).parent.parent / "backend" / "embedded"
MAX_NEW_TOKENS = 1500
UNTRAINED = "repeat_unseen"
ALL_SKILLS = (*SKILLS, UNTRAINED, *TOOL_SKILLS)


@dataclass(frozen=True, slots=True)
class Answer:
    """A model's answer; `ended` is true if it ended by its own end token."""

    text: str
    ended: bool


@dataclass(frozen=True, slots=True)
class Task:
    """A conversation, its tools, a right answer, and the check of an answer."""

    messages: list[dict[str, object]]
    tools: list[dict[str, object]]
    expected: str
    is_right: Callable[[Answer], bool]


Engine = Callable[[Sequence[Task]], list[Answer]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=FOLDER, help="Hugging Face directory (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=200, help="fresh prompts a skill (default: %(default)s)")
    parser.add_argument("--skills", nargs="+", default=ALL_SKILLS, choices=ALL_SKILLS, help="(default: all)")
    parser.add_argument("--seed", type=int, default=7, help="seed of the prompts (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", help="dtype to compute in (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="threads torch may use (default: %(default)s)")
    parser.add_argument("--show-wrong", action="store_true", help="print the wrong answers")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    engine = transformers_engine(options.model, getattr(torch, options.dtype))
    wrong = {
        skill: wrong_answers(engine, skill, options.prompts, options.seed)
        for skill in tqdm(options.skills, leave=False)
    }
    print_table(wrong, options.prompts)
    if options.show_wrong:
        print_wrong(wrong)


def transformers_engine(folder: Path, dtype: torch.dtype, batch_size: int = 50) -> Engine:
    """Greedy answers to conversations, in left-padded batches."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    model.eval()

    def answer_batch(tasks: Sequence[Task]) -> list[Answer]:
        prompts = [
            tokenizer.apply_chat_template(
                task.messages, tools=task.tools or None, add_generation_prompt=True, tokenize=False
            )
            for task in tasks
        ]
        inputs = tokenizer(prompts, add_special_tokens=False, padding=True, return_tensors="pt")
        inputs.pop("token_type_ids", None)
        outputs = model.generate(**inputs, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
        answers = outputs[:, inputs["input_ids"].shape[1] :]  # [batch, num_new_tokens]
        return [
            Answer(tokenizer.decode(row, skip_special_tokens=True), bool((row == tokenizer.eos_token_id).any()))
            for row in answers
        ]

    def answer(tasks: Sequence[Task]) -> list[Answer]:
        batches = (tasks[start : start + batch_size] for start in range(0, len(tasks), batch_size))
        return [answer for batch in batches for answer in answer_batch(batch)]

    return answer


def fresh_tasks(skill: str, num_tasks: int, seed: int) -> list[Task]:
    """Tasks of a skill with arguments that training never saw."""
    if skill not in TOOL_SKILLS:
        return [_chat(example) for example in fresh_prompts(num_tasks, seed, (skill,))]
    turns = fresh_tool_turns(num_tasks, seed, skill)
    return [_with_tools(tools, turn, with_results=skill == "tool_answer") for tools, turn in turns]


def _chat(example: Example) -> Task:
    messages: list[dict[str, object]] = [{"role": "user", "content": example.prompt}]
    return Task(messages, [], example.answer, lambda answer: example.is_right(answer.text, ended=answer.ended))


def _with_tools(tools: tuple[Tool, ...], turn: ToolTurn, *, with_results: bool) -> Task:
    expected = turn.answer if with_results else turn.first_text
    messages = turn.messages(with_results=with_results)
    return Task(messages, [tool.schema() for tool in tools], expected, lambda answer: answer == Answer(expected, True))


def wrong_answers(engine: Engine, skill: str, num_prompts: int, seed: int) -> list[tuple[Task, Answer]]:
    """The fresh tasks of a skill that the engine got wrong; short expected answers run together."""
    tasks = sorted(fresh_tasks(skill, num_prompts, seed), key=lambda task: len(task.expected))
    answers = engine(tasks)
    return [(task, answer) for task, answer in zip(tasks, answers, strict=True) if not task.is_right(answer)]


def print_table(wrong: dict[str, list[tuple[Task, Answer]]], num_prompts: int) -> None:
    """A markdown table; the total leaves out what was never trained."""
    print("| skill | right | of |\n|---|---|---|")
    for skill, pairs in wrong.items():
        print(f"| {skill} | {100 * (1 - len(pairs) / num_prompts):.1f} % | {num_prompts} |")
    trained = [pairs for skill, pairs in wrong.items() if skill != UNTRAINED]
    num_all = num_prompts * len(trained)
    print(f"| all but {UNTRAINED} | {100 * (1 - sum(map(len, trained)) / num_all):.1f} % | {num_all} |")


def print_wrong(wrong: dict[str, list[tuple[Task, Answer]]]) -> None:
    for skill, pairs in wrong.items():
        for task, answer in pairs:
            print(f"\n{skill}: {task.messages[0]['content']}\n  expected {task.expected}\n  answered {answer.text}")


if __name__ == "__main__":
    main()
