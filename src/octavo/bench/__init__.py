"""`octavo bench`: this engine's speed, a peer's on the same work in the same run, perplexity of weight formats."""

from __future__ import annotations

# What --mode takes -> the value of --draft it stands for. `scripted` drafts are always wrong: what drafting costs.
MODES = {
    "plain": "none",
    "ngram": "ngram",
    "table": "table",
    "ngram+table": "ngram+table",
    "eagle3": "eagle3",
    "dflash": "dflash",
    "ngram+eagle3": "ngram+eagle3",
    "ngram+dflash": "ngram+dflash",
    "scripted": "scripted",
    "best": "auto",
}
