#!/usr/bin/env python3
"""Check a real model, SmolLM2-135M-Instruct in GGUF's Q4_1, offline and served: `scripts/check_models.py`.

Fetches it first if it is not there (scripts/download smollm2). Weights are compared bit by bit, and greedy texts token
by token, with those of transformers, which reads the file with ggml's package gguf, installed for the run. Products of
integers have to leave the perplexity of a text what it is, and at most 0.5 % above llama.cpp's of the same file.
Served, it has to answer a chat with sense, stream it, stop at its end token, fill a JSON schema, call a tool that it
has to, and read a result. The time from the command to the first streamed token is measured with the file in the cache,
with and without the folder that is made of it. Writes labs/benchmarks/results/models.json; exit status 1 when a check
failed.
"""

import json
import math
import os
import shutil
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any, get_args

import torch
from openai import OpenAI

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from backend import LLM, SamplingParams
from backend.bound_process import bound
from backend.config import EngineOptions, Quantization
from backend.model.hub import resolve_model
from backend.model.model_config import read_model_config
from backend.model.weights import checkpoint_names, load_weights
from backend.text.tokenizer import Tokenizer
from labs.benchmarks.llama_environment import llama_python
from labs.benchmarks.processes import ROOT
from labs.benchmarks.quantized_peers import file_in
from labs.benchmarks.report import RESULTS, Report
from labs.benchmarks.served import served

MODEL, TENANT = "smollm2", "models"
NUM_TOKENS = 32
HELD_TEXT, HELD_TOKENS = "fairness.md", 2000
BESIDE_LLAMA = ("Q4_1", "Q8_0")
READERS = ["gguf==0.19.0", "accelerate==1.15.0", "psutil"]  # which transformers reads GGUF with
TEXTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at 100 degrees Celsius because",
    "La vie est",
    "1, 1, 2, 3, 5, 8,",
    "Photosynthesis is the process by which 12345 plants",
    "Dear Sir or Madam,\n\nI am writing to",
]
CAPITALS = {"France": "Paris", "Japan": "Tokyo"}  # it does not know Italy's
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city now.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 40}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def main() -> int:
    ArgumentParser(description=__doc__).parse_args()
    subprocess.run(**bound([str(ROOT / "scripts" / "download"), MODEL]), check=True)
    torch.set_num_threads(1)  # two that wait for each other on a busy machine take ten times as long
    report = Report("models")
    check_numbers(report)
    check_rounding(report)
    first = [first_token(is_new=True), first_token(is_new=False)]
    report.add_table("seconds from the command to the first streamed token", first)
    with TemporaryDirectory() as folder, served(0, [TENANT], Path(folder), model=MODEL, dtype="float32") as server:
        client = OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=server.keys[TENANT], max_retries=0)
        rows = [told(name, check, client) for name, check in CHECKS.items()]
    report.add_table("served", rows)
    for row in rows:
        report.at_least(str(row["check"]), float(row["fault"] is None), 1.0)
    return report.finish(RESULTS)


def check_numbers(report: Report) -> None:
    """Compare weights and greedy texts with transformers'."""
    folder = resolve_model(MODEL)
    oracle = read_by_transformers((folder / "model.gguf").readlink())
    config = read_model_config(folder)
    theirs = oracle.state_dict()
    ours = dict(checkpoint_names(config, load_weights(folder, config, torch.float32)))
    equal = sum(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    llm = LLM(MODEL, EngineOptions(kv_memory_bytes=2**28, max_model_len=512), dtype="float32", device="cpu")
    tokenizer = Tokenizer.from_dir(folder, config.vocab_size)
    prompts = [tokenizer.encode_text(text, add_special_tokens=False) for text in TEXTS]
    prompts += [
        tokenizer.encode_text(tokenizer.render_chat([{"role": "user", "content": f"Capital of {country}?"}]), False)
        for country in CAPITALS
    ]
    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    found = [one.token_ids for one in llm.generate(prompts, sampling, progress=False)]
    ends = [*config.eos_token_ids]
    greedy = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": ends, "pad_token_id": ends[0]}
    wanted = [oracle.generate(torch.tensor([prompt]), **greedy)[0, len(prompt) :].tolist() for prompt in prompts]
    report.at_least("tensors equal to transformers', of all, share", equal / len(ours), 1.0)
    same = sum(one == other for one, other in zip(found, wanted, strict=True))
    report.at_least(
        f"greedy texts of {len(prompts)} equal to transformers' in float32, share", same / len(prompts), 1.0
    )
    report.add_table("compared", [{"tensors": len(ours), "texts": len(prompts), "tokens": sum(map(len, wanted))}])


def check_rounding(report: Report) -> None:
    """Compare perplexities of a text: of weights multiplied out, as the file has them, rounded, and llama.cpp's."""
    folder = resolve_model(MODEL)
    tokenizer = Tokenizer.from_dir(folder, read_model_config(folder).vocab_size)
    prompt = tokenizer.encode_text((ROOT / "docs" / HELD_TEXT).read_text(), add_special_tokens=False)[:HELD_TOKENS]
    found = {how: perplexity(MODEL, prompt, how) for how in get_args(Quantization)}
    for name in BESIDE_LLAMA:
        file = str(file_in(name))
        found[f"{name}, ours"] = perplexity(file, prompt, "auto")
        found[f"{name}, llama.cpp"] = theirs = perplexity_of_llama(file, prompt)
        report.at_most(f"perplexity in {name}, times llama.cpp's", found[f"{name}, ours"] / theirs, 1.005)
    report.add_table(f"perplexity of docs/{HELD_TEXT}, {len(prompt)} tokens", [found])
    report.at_most("perplexity with the file's integers, times multiplied out", found["auto"] / found["none"], 1.001)
    report.at_most("perplexity with weights of 8 bits, times that without", found["int8"] / found["none"], 1.01)


def perplexity(model: str, prompt: list[int], quantization: Quantization) -> float:
    options = EngineOptions(kv_memory_bytes=2**28, max_model_len=2 * HELD_TOKENS, quantization=quantization)
    llm = LLM(model, options, dtype="float32", device="cpu", kernels="native")
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (one,) = llm.generate([prompt], scored, progress=False)
    assert one.prompt_logprobs is not None, "they were asked for"
    return math.exp(-mean(token.logprob for token in one.prompt_logprobs))


def perplexity_of_llama(file: str, prompt: list[int]) -> float:
    flags = ["--model", file, "--dtype", "float32", "--perplexity"]
    command = bound([str(llama_python()), "-m", "labs.benchmarks.peers.llama_cpp", *flags])
    told = subprocess.run(**command, cwd=ROOT, check=True, input=json.dumps(prompt), text=True, stdout=subprocess.PIPE)
    return float(told.stdout)


def read_by_transformers(file: Path) -> Any:
    with TemporaryDirectory() as folder:
        subprocess.run(
            **bound([str(ROOT / "scripts" / "install"), "--target", str(folder), "--no-deps", *READERS]), check=True
        )
        sys.path.append(folder)
        try:
            from transformers import AutoModelForCausalLM  # noqa: PLC0415 - it looks then for what it may import

            model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        finally:
            sys.path.remove(folder)
    return model.eval()


def first_token(is_new: bool) -> dict[str, object]:
    """Start `sluice serve` as a user does and stream one answer."""
    if is_new:
        shutil.rmtree(resolve_model(MODEL).parent)
    with TemporaryDirectory() as folder:
        environ = os.environ | {
            "PYTHONPATH": str(ROOT),
            "SLUICE_STATE_DIR": folder,
            "SLUICE_DEMO_KEY": "sk-sluice-demo-models",
        }
        began, spent = time.monotonic(), sum(os.times()[2:4])
        command = [
            sys.executable,
            "-P",
            "-m",
            "sluice",
            "serve",
            "--model",
            MODEL,
            "--port",
            "0",
            "--admin-port",
            "off",
        ]
        with subprocess.Popen(**bound(command), env=environ, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                ready = next(line for line in process.stdout if "is ready at" in line)
                told_ready = time.monotonic() - began
                client = OpenAI(base_url=f"{ready.split()[-1]}/v1", api_key="sk-sluice-demo-models")
                next(pieces(client, "Hi"))
                first = time.monotonic() - began
            finally:
                process.terminate()
                process.communicate()
        spent = sum(os.times()[2:4]) - spent
    row = {"folder": "made" if is_new else "there", "ready": told_ready, "first token": first, "CPU in all": spent}
    return {name: round(value, 2) if isinstance(value, float) else value for name, value in row.items()}


def told(name: str, check: Callable[[OpenAI], str], client: OpenAI) -> dict[str, object]:
    try:
        return {"check": name, "answer": check(client)[:200], "fault": None}
    except Exception as error:  # noqa: BLE001 - a row of the report
        return {"check": name, "answer": "", "fault": f"{type(error).__name__}: {error}"[:500]}


def pieces(client: OpenAI, text: str) -> Iterator[str]:
    asked: list[Any] = [{"role": "user", "content": text}]
    for chunk in client.chat.completions.create(model=MODEL, messages=asked, temperature=0, max_tokens=64, stream=True):
        if chunk.choices and chunk.choices[0].delta.content:
            yield chunk.choices[0].delta.content


def asked(client: OpenAI, text: str, **fields: Any) -> Any:
    messages: list[Any] = [{"role": "user", "content": text}]
    return client.chat.completions.create(
        **{"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 200} | fields
    )


def sense(client: OpenAI) -> str:
    answers = [asked(client, f"What is the capital of {country}?").choices[0] for country in CAPITALS]
    for answer, capital in zip(answers, CAPITALS.values(), strict=True):
        assert capital in answer.message.content, answer
    return " ".join(answer.message.content for answer in answers)


def end(client: OpenAI) -> str:
    whole = asked(client, "What is the capital of France?")
    assert whole.choices[0].finish_reason == "stop" and whole.usage.completion_tokens < 200, whole
    assert "<|" not in whole.choices[0].message.content, whole
    return f"stop after {whole.usage.completion_tokens} tokens"


def stream(client: OpenAI) -> str:
    said = [*pieces(client, "What is the capital of France?")]
    assert len(said) > 3, said
    assert "".join(said) == asked(client, "What is the capital of France?", max_tokens=64).choices[0].message.content
    return " | ".join(said)


def schema(client: OpenAI) -> str:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    answer = asked(client, "Describe Ada, who is 36 years old, as JSON.", response_format=form).choices[0]
    person = json.loads(answer.message.content)
    assert person.keys() == {"name", "age"} and isinstance(person["age"], int), person
    return str(answer.message.content)


def required_call(client: OpenAI) -> str:
    return called(
        asked(
            client, "What is the weather in Paris?", tools=[WEATHER], tool_choice="required", parallel_tool_calls=False
        )
    )


def called(answer: Any) -> str:
    choice = answer.choices[0]
    (call,) = choice.message.tool_calls or [None]
    assert call is not None and call.function.name == "get_weather", choice
    arguments = json.loads(call.function.arguments)
    assert "Paris" in arguments["city"] and choice.finish_reason == "tool_calls", choice
    return f"{call.function.name}({call.function.arguments})"


def result(client: OpenAI) -> str:
    call = {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        {"role": "user", "content": "What is the weather in Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "sunny, 24 degrees"},
    ]
    answer = asked(client, "", messages=messages, tools=[WEATHER], tool_choice="none").choices[0]
    assert "sunny" in answer.message.content.lower() or "24" in answer.message.content, answer
    return str(answer.message.content)


CHECKS: dict[str, Callable[[OpenAI], str]] = {
    "a chat has sense": sense,
    "it ends at its end token": end,
    "it streams": stream,
    "it fills a JSON schema": schema,
    "it calls a tool that it has to": required_call,
    "it reads a tool's result": result,
}


if __name__ == "__main__":
    sys.exit(main())
