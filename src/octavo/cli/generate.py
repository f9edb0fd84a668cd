"""`octavo generate`: prompts in, text out, then one line of figures."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from octavo.cli import common
from octavo.config import EngineConfig
from octavo.errors import UserError

if TYPE_CHECKING:
    from octavo import LLM
    from octavo.params import SamplingParams

HELP = "answer one or more prompts"
EXAMPLES = [
    'octavo generate "Why is the sky blue?"',
    "octavo generate --model gemma3-270m --accept-license --raw 'Once upon a time'",
    "cat letter.txt | octavo generate - --max-tokens 400",
    "octavo generate 'First prompt' 'Second prompt' --draft ngram --json",
]
DEFAULT_MAX_TOKENS = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompts", nargs="*", metavar="PROMPT",
                        help="text to answer, each argument a prompt of its own; - reads standard input")
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
        raise UserError("--system needs the chat template that --raw switches off")
    with common.open_llm(config, quiet=args.quiet or args.json) as llm:
        ids = [encode(llm, prompt, raw=args.raw, system=args.system) for prompt in prompts]
        if args.json:
            results, interrupted = _collect(llm, ids, params), False
            document = _document(llm, prompts, results)
            print(json.dumps(document, ensure_ascii=False))
        elif len(ids) == 1 and params.n == 1:
            results, interrupted = stream_answer(llm, ids[0], params)
        else:
            results, interrupted = _collect(llm, ids, params), False
            _print_several(prompts, results)
        if not args.json:
            if results and not args.quiet:
                print(common.figures_line(results))
            if args.show_kv:
                from octavo.cli.books import print_books

                print_books(llm)
    return 130 if interrupted else 0


def _read_prompts(arguments: list[str]) -> list[str]:
    if not arguments and sys.stdin.isatty():
        raise UserError('no prompt: give one as an argument, e.g. octavo generate "Why is the sky blue?"')
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


def stream_answer(llm: LLM, ids: list[int], params: SamplingParams) -> tuple[list[Any], bool]:
    """Print one answer while it is written. Returns its result and whether Ctrl-C cut it off."""
    last, interrupted = None, False
    stream = llm.stream(ids, params)
    try:
        for last in stream:
            sys.stdout.write(last.delta)
            sys.stdout.flush()
    except KeyboardInterrupt:
        interrupted = True
        stream.close()
    sys.stdout.write("\n")
    sys.stdout.flush()
    return [last] if last is not None else [], interrupted


def _collect(llm: LLM, ids: list[list[int]], params: SamplingParams) -> list[Any]:
    """All results, choices of one prompt side by side."""
    return [choice for result in llm.generate(ids, params) for choice in (getattr(result, "choices", None) or [result])]


def _print_several(prompts: list[str], results: list[Any]) -> None:
    each = max(1, len(results) // max(1, len(prompts)))
    for number, result in enumerate(results):
        title = " ".join(prompts[number // each].split())
        title = title if len(title) <= 70 else title[:67] + "..."
        print(f"── {number + 1}. {title}\n{result.text}\n")


def _document(llm: LLM, prompts: list[str], results: list[Any]) -> dict[str, Any]:
    """What --json prints. The first answer's fields stand at the top level too."""
    each = max(1, len(results) // max(1, len(prompts)))
    outputs = []
    for number, result in enumerate(results):
        outputs.append({
            "prompt": prompts[number // each],
            "text": result.text,
            "token_ids": list(result.token_ids),
            "prompt_token_ids": list(result.prompt_token_ids),
            "finish_reason": result.finish_reason,
            "logprobs": plain(result.logprobs),
            "figures": plain(common.metrics_dict(result.metrics)),
        })
    first = {key: outputs[0][key] for key in ("text", "token_ids", "finish_reason", "figures")} if outputs else {}
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
