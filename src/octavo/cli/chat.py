"""`octavo chat`: a conversation in the terminal. Ctrl-C stops an answer, not the program."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from octavo.cli import common
from octavo.cli.generate import stream_answer
from octavo.config import EngineConfig
from octavo.errors import RequestError, UserError

if TYPE_CHECKING:
    from octavo import LLM
    from octavo.params import SamplingParams

HELP = "talk with a chat model in the terminal"
EXAMPLES = [
    "octavo chat",
    "octavo chat --system 'You answer in one sentence.' --temperature 0.7",
    "octavo chat --model ./base-model.gguf --chat-template template.jinja",
]
KEYS = "/reset forgets the conversation, /kv shows the books, /exit or Ctrl-D ends, Ctrl-C stops an answer"
DEFAULT_MAX_TOKENS = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("-q", "--quiet", action="store_true", help="no start-up lines and no figures")
    common.add_sampling_options(parser, max_tokens=DEFAULT_MAX_TOKENS)
    common.add_config_options(parser, EngineConfig)


def run(args: argparse.Namespace) -> int:
    config = common.config_from(args, EngineConfig)
    params = common.sampling_from(args, config)
    with common.open_llm(config, quiet=args.quiet) as llm:
        if not llm.tokenizer.chat_template:
            raise UserError(
                f"{config.model} is a base model without a chat template; give one with "
                "--chat-template FILE, or use `octavo generate --raw`"
            )
        conversation = Conversation(llm, params, args.system)
        if sys.stdin.isatty() and not args.quiet:
            print(KEYS)
        while (line := _read_line()) is not None:
            if line in ("/exit", "/quit"):
                break
            if line:
                conversation.turn(line, figures=not args.quiet)
    return 0


def _read_line() -> str | None:
    """The next thing the user says; None at the end of input."""
    interactive = sys.stdin.isatty()
    while True:
        try:
            line = input("you> " if interactive else "")
            return common.check_text(line.strip(), "input")
        except EOFError:
            if interactive:
                print()
            return None
        except KeyboardInterrupt:
            if not interactive:
                raise
            print("\n(Ctrl-D or /exit ends the conversation)")
        except UnicodeDecodeError as error:
            raise UserError(f"input: byte at offset {error.start} is not UTF-8") from None


class Conversation:
    """The messages so far; each turn sends them all, and the prefix cache makes that cheap."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self.llm, self.params = llm, params
        self.start = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = list(self.start)

    def turn(self, line: str, *, figures: bool) -> None:
        """Answer one line, or carry out a command that begins with a slash."""
        if line.startswith("/"):
            self._command(line)
            return
        asked = [*self.messages, {"role": "user", "content": line}]
        try:
            answer, _ = stream_answer(self.llm, list(self.llm.tokenizer.encode_chat(asked)), self.params)
        except RequestError as error:  # e.g. the conversation has outgrown the context: say so and go on
            print(f"octavo: {error} (/reset begins anew)", file=sys.stderr)
            return
        self.messages = [*asked, {"role": "assistant", "content": answer.text}]
        if figures:
            print(f"  [{common.figures_line([answer])}]")

    def _command(self, line: str) -> None:
        if line == "/reset":
            self.messages = list(self.start)
        elif line == "/kv":
            from octavo.cli.books import print_books

            print_books(self.llm)
        else:
            print(KEYS)
