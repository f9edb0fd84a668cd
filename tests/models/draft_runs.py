"""Runs of drafts on real models: any two values of any two columns meet in at least one run, and some meet often.

A chain of `length` tokens, a block of `length` + 1, or the tree that `TREES` names; `chunk` is the token budget of a
step. `test_draft_runs.py` runs them, 48 tokens each, and checks that the list covers every pair.
"""

from __future__ import annotations

from typing import NamedTuple


class DraftRun(NamedTuple):
    """One engine and one batch."""

    model: str
    draft: str
    page_size: int
    length: int
    overlap: bool
    adaptive: bool
    streams: int
    sampling: str
    chunk: int


COLUMNS: dict[str, tuple[object, ...]] = {
    "model": ("smollm2", "gemma3-270m"),
    "draft": ("scripted", "ngram", "eagle3", "tree", "dflash", "ngram+table"),
    "page_size": (1, 16, 64, 256),
    "length": (1, 3, 5, 8),
    "overlap": (False, True),
    "adaptive": (False, True),
    "streams": (1, 2, 5, 8),
    "sampling": ("greedy", "sampled", "mixed"),
    "chunk": (24, 512),
}
TREES = {1: (1, 4, 5), 3: (2, 2, 6), 5: (3, 3, 12), 8: (5, 8, 64)}  # length: steps, top-k, nodes
RUNS = [
    DraftRun(*row)
    for row in (
        ("smollm2", "scripted", 256, 8, True, False, 8, "mixed", 24),
        ("smollm2", "dflash", 16, 5, False, True, 1, "greedy", 512),
        ("gemma3-270m", "tree", 1, 1, False, False, 5, "sampled", 512),
        ("gemma3-270m", "eagle3", 256, 1, True, True, 2, "sampled", 24),
        ("gemma3-270m", "ngram", 64, 5, False, False, 2, "greedy", 24),
        ("smollm2", "scripted", 64, 3, True, True, 5, "sampled", 512),
        ("smollm2", "ngram", 1, 3, False, True, 1, "mixed", 24),
        ("gemma3-270m", "ngram", 16, 8, False, False, 8, "sampled", 512),
        ("smollm2", "dflash", 16, 1, True, False, 2, "mixed", 24),
        ("smollm2", "tree", 64, 8, True, True, 1, "greedy", 24),
        ("smollm2", "eagle3", 1, 5, True, False, 5, "greedy", 24),
        ("gemma3-270m", "eagle3", 64, 3, False, False, 8, "mixed", 24),
        ("gemma3-270m", "scripted", 256, 3, False, True, 1, "greedy", 512),
        ("gemma3-270m", "dflash", 1, 8, True, True, 2, "sampled", 512),
        ("smollm2", "tree", 256, 5, False, False, 8, "mixed", 512),
        ("smollm2", "dflash", 64, 1, True, False, 8, "greedy", 512),
        ("smollm2", "ngram", 256, 1, True, True, 5, "mixed", 512),
        ("smollm2", "eagle3", 16, 3, True, False, 1, "sampled", 512),
        ("smollm2", "scripted", 1, 5, False, True, 8, "sampled", 24),
        ("smollm2", "tree", 16, 3, False, True, 2, "sampled", 512),
        ("smollm2", "scripted", 16, 1, True, False, 2, "sampled", 512),
        ("smollm2", "dflash", 16, 3, False, True, 5, "sampled", 24),
        ("smollm2", "eagle3", 16, 8, True, False, 5, "mixed", 24),
        ("smollm2", "dflash", 256, 1, True, False, 1, "sampled", 512),
        ("smollm2", "eagle3", 1, 8, True, True, 8, "mixed", 24),
        ("smollm2", "tree", 256, 5, True, False, 8, "greedy", 512),
        ("smollm2", "dflash", 64, 3, True, False, 5, "sampled", 512),
        ("smollm2", "ngram", 16, 1, True, True, 5, "mixed", 512),
        ("smollm2", "scripted", 1, 8, True, False, 2, "greedy", 512),
        ("smollm2", "tree", 256, 5, True, False, 2, "sampled", 24),
        ("smollm2", "eagle3", 64, 3, False, True, 1, "mixed", 24),
        ("smollm2", "tree", 16, 1, True, False, 1, "greedy", 512),
        ("smollm2", "dflash", 1, 8, True, True, 8, "sampled", 512),
        ("smollm2", "ngram", 256, 5, False, True, 8, "mixed", 24),
        ("smollm2", "scripted", 64, 3, False, True, 5, "greedy", 24),
        ("smollm2", "tree", 16, 1, True, True, 5, "sampled", 512),
        ("smollm2", "ngram+table", 1, 3, False, True, 8, "mixed", 512),
        ("gemma3-270m", "ngram+table", 16, 8, True, False, 1, "greedy", 24),
        ("smollm2", "ngram+table", 64, 5, True, False, 5, "sampled", 24),
        ("smollm2", "ngram+table", 256, 1, False, True, 2, "greedy", 512),
    )
]
