"""`octavo generate`: prompts in, text out, then one line of figures."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from octavo.cli import common
from octavo.config import EngineConfig
from octavo.errors import UsageError

if TYPE_CHECKING:
    from octavo import LLM, RequestOutput
    from octavo.params import SamplingParams

EXIT_INTERRUPTED = 130

HELP = "answer one or more prompts"
EXAMPLES = [
    'octavo generate "Why is the sky blue?"',
    "octavo generate --model gemma3-270m --accept-license --raw 'Once upon a time'",
    "cat letter.txt | octavo generate - --max-tokens 400",
    "octavo generate 'First prompt' 'Second prompt' --draft ngram --json",
]
DEFAULT_MAX_TOKENS = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompts",
        nargs="*",
        metavar="PROMPT",
        help="text to answer, each argument a prompt of its own; - reads standard input",
    )
    parser.add_argument("--system", metavar="TEXT", help="system message for chat models")
    parser.add_argument("--raw", action="store_true", help="do not apply the model's chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object (docs/schemas/generate.json)")
    parser.add_argument("-q", "--quiet", action="store_true", help="print the text alone")
    parser.add_argument("--show-kv", action="store_true", help="show the KV books after the answer")
    common.add_sampling_options(parser, max_tokens=DEFAULT_MAX_TOKENS)
    common.add_config_options(parser, EngineConfig)


def run(args: argparse.Namespace) -> int:
    config = common.config_from(args, EngineConfig)
    params = common.sampling_from(args, config)
    prompts = _read_prompts(args.prompts)
    if args.raw and args.system:
        raise UsageError("--system needs the chat template that --raw switches off")
    with common.open_llm(config, quiet=args.quiet or args.json) as llm:
        ids = [encode(llm, prompt, raw=args.raw, system=args.system) for prompt in prompts]
        if args.json:
            results, interrupted = _collect(llm, ids, params)
            print(json.dumps(_document(llm, prompts, results), ensure_ascii=False))
            return EXIT_INTERRUPTED if interrupted else 0
        answers: list[Any]
        if len(ids) == 1 and params.n == 1:
            answer, interrupted = stream_answer(llm, ids[0], params)
            answers = [answer]
        else:
            results, interrupted = _collect(llm, ids, params)
            answers = [output for result in results for output in result.outputs]
            _print_several(prompts, results)
        if not args.quiet:
            print(common.figures_line(answers))
        if args.show_kv:
            from octavo.cli.books import print_books

            print_books(llm)
    return EXIT_INTERRUPTED if interrupted else 0


def _read_prompts(arguments: list[str]) -> list[str]:
    if not arguments and sys.stdin.isatty():
        raise UsageError('no prompt: give one as an argument, e.g. octavo generate "Why is the sky blue?"')
    prompts, stdin = [], None
    for argument in arguments or ["-"]:
        if argument == "-":
            stdin = common.read_stdin() if stdin is None else stdin
            argument = stdin
        prompts.append(common.check_text(argument, "prompt"))
    return prompts


def encode(llm: LLM, prompt: str, *, raw: bool, system: str | None = None) -> list[int]:
    """Token ids of `prompt`: through the chat template where the model has one, unless `raw`."""
    tokenizer = llm.tokenizer
    if raw or not tokenizer.chat_template:
        return list(tokenizer.encode(prompt))
    messages = [{"role": "system", "content": system}] if system else []
    return list(tokenizer.encode_chat([*messages, {"role": "user", "content": prompt}]))


@dataclass
class Answer:
    """One answer put together from the pieces of a stream."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    metrics: Any = None


def stream_answer(llm: LLM, ids: list[int], params: SamplingParams) -> tuple[Answer, bool]:
    """Print one answer while it is written. Returns it and whether Ctrl-C cut it off."""
    answer = Answer()
    with interrupts(llm) as interrupted:
        for piece in llm.stream(ids, params):
            answer.text += piece.text
            answer.token_ids += piece.token_ids
            answer.finish_reason, answer.metrics = piece.finish_reason, piece.metrics
            sys.stdout.write(piece.text)
            sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    return answer, interrupted()


@contextmanager
def interrupts(llm: LLM) -> Iterator[Callable[[], bool]]:
    """Ctrl-C ends what is being generated after the step in progress, never in the middle of the books.

    Yields a function that says whether it was pressed. A second Ctrl-C is an ordinary KeyboardInterrupt.
    """
    pressed = False

    def on_signal(number: int, frame: Any) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True
        llm.interrupt()

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _collect(llm: LLM, ids: list[list[int]], params: SamplingParams) -> tuple[list[RequestOutput], bool]:
    """All results, and whether Ctrl-C cut them off."""
    with interrupts(llm) as interrupted:
        results = llm.generate(ids, params)
    return results, interrupted()


def _print_several(prompts: list[str], results: list[RequestOutput]) -> None:
    for prompt, result in zip(prompts, results, strict=True):
        title = " ".join(prompt.split())
        title = title if len(title) <= 70 else title[:67] + "..."
        for output in result.outputs:
            number = f" ({output.index + 1})" if len(result.outputs) > 1 else ""
            print(f"── {title}{number}\n{output.text}\n")


def _document(llm: LLM, prompts: list[str], results: list[RequestOutput]) -> dict[str, Any]:
    """What --json prints. The first answer's fields stand at the top level too."""
    outputs = [
        {
            "prompt": prompt,
            "index": output.index,
            "text": output.text,
            "token_ids": list(output.token_ids),
            "prompt_token_ids": list(result.prompt_token_ids),
            "finish_reason": output.finish_reason,
            "logprobs": plain(output.logprobs),
            "figures": common.metrics_dict(output.metrics),
        }
        for prompt, result in zip(prompts, results, strict=True)
        for output in result.outputs
    ]
    first = {key: outputs[0][key] for key in ("text", "token_ids", "finish_reason", "figures")}
    return {"model": llm.config.model, **first, "outputs": outputs, "books": plain(llm.kv_report())}


def plain(value: Any) -> Any:
    """`value` as JSON types: dataclasses, mappings, sequences and numpy scalars included."""
    import dataclasses

    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(v) for v in value]
    if hasattr(value, "item") and not isinstance(value, (str, bytes)):
        return value.item()
    return value
