"""Commands on a tiny random model on disk: what they print, the JSON they promise, Ctrl-C, exit codes."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from safetensors.torch import save_file

from octavo.bench import engines
from octavo.bench.engines import Ours, run
from octavo.bench.workload import Case
from octavo.cli import main
from octavo.config import EngineConfig
from tests.tiny import EOS, RandomSource, byte_tokenizer, config_of

ROOT = Path(__file__).resolve().parents[2]
COMMON = ("--threads", "1", "--kv-memory", "16MiB", "--draft", "none")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A safetensors folder as a hub has it: config.json, model.safetensors, tokenizer.json, a chat template."""
    folder = tmp_path_factory.mktemp("tiny")
    config = config_of("llama", context_tokens=4096)
    source = RandomSource(config)
    save_file({name: source.tensor(name).contiguous() for name in source.names()}, folder / "model.safetensors")
    folder.joinpath("config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "vocab_size": config.vocab_size,
                "hidden_size": config.hidden_size,
                "intermediate_size": config.intermediate_size,
                "num_hidden_layers": config.num_layers,
                "num_attention_heads": config.num_heads,
                "num_key_value_heads": config.num_kv_heads,
                "head_dim": config.head_dim,
                "max_position_embeddings": config.context_tokens,
                "rms_norm_eps": config.rms_eps,
                "rope_theta": config.rope.theta,
                "tie_word_embeddings": True,
                "hidden_act": "silu",
                "eos_token_id": EOS,
            }
        )
    )
    tokenizer = byte_tokenizer()
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    folder.joinpath("tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|end|>", "chat_template": tokenizer.chat_template})
    )
    return folder


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


def octavo(*arguments: object, stdin: bytes = b"") -> Done:
    """The command in this process (a process of its own pays two seconds of imports each time)."""
    out, err = io.StringIO(), io.StringIO()
    before, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = main([str(argument) for argument in arguments])
    finally:
        sys.stdin = before
    return Done(code, out.getvalue(), err.getvalue())


def matches_schema(name: str, document: dict[str, Any]) -> None:
    jsonschema.validate(document, json.loads((ROOT / f"docs/schemas/{name}.json").read_text()))


def test_generate_prints_the_text_then_one_line_of_figures(model: Path) -> None:
    done = octavo("generate", "--model", model, *COMMON, "hello", "--max-tokens", 8, "--ignore-eos")
    assert done.returncode == 0, done.stderr
    figures = done.stdout.splitlines()[-1]
    for part in ("8 tokens · ", " tokens/s", "first token ", " ms", "accept length 1.00", "KV 2 pages"):
        assert part in figures
    start = done.stderr.splitlines()
    assert [line.split()[0] for line in start] == ["model", "kernels", "weights", "KV", "fits", "draft"]


def test_json_keeps_its_schema_and_the_books_close(model: Path) -> None:
    done = octavo(
        "generate", "--model", model, *COMMON, "a", "b", "--json", "--max-tokens", 6, "--ignore-eos", "--logprobs", 2
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    matches_schema("generate", document)
    assert len(document["outputs"]) == 2 and document["token_ids"] == document["outputs"][0]["token_ids"]
    assert all(len(o["token_ids"]) == len(o["logprobs"]) == 6 for o in document["outputs"])
    for pool in document["books"]["pools"].values():
        assert pool["held"] == 0 and pool["free"] + pool["cached"] == pool["total"]


def test_stdin_raw_and_template_differ_as_they_should(model: Path) -> None:
    arguments = ("--model", model, *COMMON, "--json", "--max-tokens", 1)
    raw = json.loads(octavo("generate", "-", "--raw", *arguments, stdin=b"hi").stdout)
    chat = json.loads(octavo("generate", *arguments, "--system", "S", stdin=b"hi").stdout)
    assert bytes_of(raw) == "hi"
    assert bytes_of(chat) == "system: S\nuser: hi\nassistant: "


def bytes_of(document: dict[str, Any]) -> str:
    return byte_tokenizer().decode(document["outputs"][0]["prompt_token_ids"])


def test_quiet_prints_the_text_alone(model: Path) -> None:
    arguments = ("generate", "--model", model, *COMMON, "hello", "--max-tokens", 5, "--ignore-eos")
    text = json.loads(octavo(*arguments, "--json").stdout)["text"]
    done = octavo(*arguments, "--quiet")
    assert (done.stdout, done.stderr) == (text + "\n", "")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("", "--raw"), 1, "empty"),
        (("x" * 5000, "--raw"), 1, "4096"),
        (("x", "--kv-memory", "1KiB"), 2, "--kv-memory"),
        (("x", "--max-model-len", "100000"), 2, "--max-model-len"),
        (("x", "--chat-template", "/nowhere.jinja"), 1, "/nowhere.jinja"),
    ],
)
def test_user_errors_are_one_line(model: Path, arguments: tuple[str, ...], code: int, words: str) -> None:
    done = octavo("generate", *arguments, "--model", model, "--threads", "1", "--draft", "none", "-q")
    assert (done.returncode, done.stdout) == (code, "")
    assert words in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_an_unknown_model_is_one_line() -> None:
    done = octavo("generate", "x", "--model", "./no-such-model.gguf")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "no-such-model.gguf" in done.stderr


def test_zero_tokens_is_an_empty_answer(model: Path) -> None:
    document = json.loads(octavo("generate", "x", "--model", model, *COMMON, "--json", "--max-tokens", 0).stdout)
    assert (document["text"], document["token_ids"], document["finish_reason"]) == ("", [], "length")


def test_ctrl_c_ends_the_answer_cleanly(model: Path) -> None:
    """The text so far is kept, the figures and the (closed) books are printed, the exit code is 130."""
    process = subprocess.Popen(
        [sys.executable, "-m", "octavo", "generate", "--model", str(model), *COMMON, "hello", "--max-tokens", "4000",
         "--ignore-eos", "--show-kv"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    first = process.stdout.read(1)
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=200)
    text = (first + out).decode(errors="replace")
    assert process.returncode == 130, err.decode()
    assert " tokens · " in text and "full pool" in text
    assert "held 0" in text
    assert b"Traceback" not in err


def test_chat_answers_line_by_line_and_remembers(model: Path) -> None:
    lines = "one\n/kv\n/reset\ntwo\n/exit\nnever\n"
    done = octavo("chat", "--model", model, *COMMON, "--max-tokens", 4, "--ignore-eos", stdin=lines.encode())
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("[4 tokens") == 2
    assert "full pool" in done.stdout


def test_chat_needs_a_template_and_takes_one_from_a_file(model: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    for file in model.iterdir():
        if file.name != "tokenizer_config.json":
            base.joinpath(file.name).symlink_to(file)
    base.joinpath("tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    refused = octavo("chat", "--model", base, *COMMON, "-q", stdin=b"hi\n")
    assert refused.returncode == 1 and "--chat-template FILE" in refused.stderr
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    taken = octavo(
        "chat", "--model", base, *COMMON, "-q", "--max-tokens", 2, "--chat-template", template, stdin=b"hi\n"
    )
    assert taken.returncode == 0, taken.stderr


def test_bench_measures_and_records(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    done = octavo(
        "bench", "--model", model, "--threads", 1, "--kv-memory", "16MiB", "--depth", 32, "--output-tokens", 8,
        "--streams", "1,2", "--mode", "plain,ngram", "--repeats", 2, "--out", out, "--profile",
        "--plot", tmp_path / "p.svg",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(out.read_text())
    matches_schema("bench", document)
    assert [(n["mode"], n["streams"]) for n in document["lines"]] == [
        ("plain", 1), ("ngram", 1), ("plain", 2), ("ngram", 2),
    ]  # fmt: skip
    assert all(len(n["repeats"]["decode_tokens_per_s"]) == 2 for n in document["lines"])
    ngram = [n["ratios"] for n in document["lines"] if n["mode"] == "ngram"]
    assert all(r["identical_to_plain"] == 1.0 for r in ngram)
    assert "ngram" in done.stdout and "peak memory" in done.stdout and "whole step" in done.stdout
    for profile in document["profiles"]:
        assert 0 < profile["parts_s"]["network"] < sum(profile["parts_s"].values()) <= profile["wall_s"] * 1.001
        assert sum(profile["operations_s"].values()) <= profile["parts_s"]["network"] * 1.01
    assert (tmp_path / "p.svg").read_text().startswith("<svg")


def test_streams_ask_again_when_they_have_their_answer_and_pause_in_between(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0  # passes in pauses only
    monkeypatch.setattr(engines, "PIECE_S", -1.0)  # a pause behind every step
    monkeypatch.setattr(engines, "time", SimpleNamespace(perf_counter=lambda: now, monotonic=time.monotonic))
    ours = Ours("plain", EngineConfig(model=str(model), threads=1, kv_memory=16 << 20))
    prompts = [[5, 6, 7], [9] * 12, [8, 3], [11] * 5, [4, 4, 9, 2]]
    alone = [run(ours, [prompt], Case("chat", 1, None, 6)).output_ids[0] for prompt in prompts]
    core, together = ours.llm.core, []
    step = core.step

    def watched() -> Any:
        together.append(len(core.scheduler.running) + len(core.scheduler.waiting))
        return step()

    core.step = watched  # type: ignore[method-assign]
    pieces = []
    for piece in ours.pieces(prompts, Case("chat", 2, None, 6)):
        pieces.append(piece)
        now += 9.0
    *pauses, sample = pieces
    assert sample is not None and pauses == [None] * (len(together) - 1)
    assert (sample.wall_s, sample.first_token_s) == (0.0, [0.0] * 5), "pauses do not count"
    assert sample.output_ids == alone and len(sample.first_token_s) == len(sample.figures) == 5
    assert max(together) == 2
    ours.close()


def test_bench_scores_weight_formats(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 80)
    done = octavo("bench", "--model", model, "--threads", 1, "--perplexity", "exact,float32,int8",
                  "--perplexity-tokens", 300, "--perplexity-text", text, "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    matches_schema("bench", document)
    exact, float32, int8 = document["perplexity"]
    assert exact["change"] == 0.0 and exact["tokens"] == 299 and document["text"] == "text.txt"
    assert float32["tokens"] == 299 and abs(float32["change"]) < 1e-4
    assert 0 < abs(int8["change"]) < 0.5


def test_doctor_checks_pass_and_keep_their_schema(model: Path) -> None:
    done = octavo("doctor", "--model", model, *COMMON, "--json")
    document = json.loads(done.stdout)
    matches_schema("doctor", document)
    assert document["healthy"] and done.returncode == 0, document["checks"]
    assert [c["name"] for c in document["checks"]] == ["rows", "text", "perplexity", "books"]


def test_doctor_sees_a_kernel_whose_bits_depend_on_the_rows() -> None:
    """A network that answers a little differently in company fails the rows check."""
    from octavo.doctor import check_rows
    from tests.tiny import engine

    core = engine()
    network = core.runner.network
    assert check_rows(network, 16).passed
    forward = network.forward

    def company_matters(meta: Any, kv: Any, taps: tuple[int, ...] = ()) -> Any:
        hidden, features = forward(meta, kv, taps)
        return (hidden if meta.num_tokens != 3 else hidden * (1 + 2**-20)), features

    network.forward = company_matters
    broken = check_rows(network, 16)
    network.forward = forward
    core.close()
    assert not broken.passed and "3 rows" in broken.detail


def test_models_lists_names_and_what_is_here(tmp_path: Path) -> None:
    empty = octavo("models", "--json", "--cache-dir", tmp_path)
    listed = json.loads(empty.stdout)
    matches_schema("models", listed)
    assert {"smollm2", "gemma3-270m"} <= {entry["name"] for entry in listed}
    assert all(entry["path"] is None for entry in listed)
    table = octavo("models", "--cache-dir", tmp_path).stdout
    assert "smollm2" in table and str(tmp_path) in table


def test_pull_of_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    done = octavo("pull", "nosuch", "--cache-dir", tmp_path)
    assert done.returncode == 1 and "smollm2" in done.stderr and done.stderr.count("\n") == 1


def test_a_recorded_trace_is_replayed_on_other_pools(model: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    asked = octavo(
        "generate", "--model", model, *COMMON, "one prompt", "one prompt more", "--max-tokens", 20, "--ignore-eos",
        "--record-trace", trace, "-q",
    )  # fmt: skip
    assert asked.returncode == 0, asked.stderr
    same = octavo("replay", trace, "--json")
    outcome = json.loads(same.stdout)
    assert same.returncode == 0 and outcome["violations"] == 0 and outcome["requests"] == 2
    other = json.loads(octavo("replay", trace, "--page-size", 64, "--num-pages", 4, "--json").stdout)
    assert other["page_size"] == 64 and other["violations"] == 0
    assert "preemptions" in octavo("replay", trace).stdout
    refused = octavo("replay", trace, "--host-pages", 9)
    assert refused.returncode == 2 and "--host-pages: got 9" in refused.stderr
    bad = octavo("replay", model / "config.json")
    assert bad.returncode == 1 and "not an Octavo KV trace" in bad.stderr


def test_a_trace_of_tiers_is_replayed_with_another_host_tier(model: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    asked = octavo(
        "generate", "--model", model, *COMMON, "one prompt", "--max-tokens", 20, "--ignore-eos", "--hisparse",
        "--record-trace", trace, "-q",
    )  # fmt: skip
    assert asked.returncode == 0, asked.stderr
    outcome = json.loads(octavo("replay", trace, "--host-pages", 9, "--json").stdout)
    assert outcome["host_pages"] == 9 and outcome["violations"] == 0
    assert outcome["tiers"]["backed_up_pages"] > 0 and "recorded_swaps" in outcome["tiers"]
    bad = octavo("replay", trace, "--host-pages", "few")
    assert bad.returncode == 2 and "--host-pages: got 'few'" in bad.stderr


def test_doctor_sees_wrong_text_and_a_costly_format() -> None:
    from octavo.doctor import check_perplexity, check_text
    from tests.tiny import engine

    core, other = engine(), engine(seed=1)
    network, wrong = core.runner.network, other.runner.network
    ids = [(7 * i + 3) % 250 for i in range(200)]
    assert check_perplexity(network, network, 16, ids).passed
    spoilt = [check_perplexity(network, wrong, 16, ids), check_perplexity(wrong, network, 16, ids)]
    assert not all(check.passed for check in spoilt)
    assert not check_text(network, 16, ids[:20], ids[20:40]).passed
    core.close()
    other.close()
