"""The acceptance rule: against brute force, lossless by a chi-squared test, and blind to what was not drafted."""

from __future__ import annotations

import math
import random

import pytest
import torch

from octavo.ops.meta import KVView
from octavo.spec.verify import accept, ancestor_mask, chain_mask, chain_parents, compact_kv, path_tokens
from tests.fake_cuda import fake_cuda


def random_tree(rng: random.Random, m: int) -> list[int]:
    return [rng.randint(0, j) for j in range(m)]


def depths_of(parents: list[int]) -> list[int]:
    depth = [0]
    for parent in parents:
        depth.append(depth[parent] + 1)
    return depth[1:]


def walk(tokens: list[int], parents: list[int], length: int, sampled: list[int], max_depth: int) -> list[int]:
    """The obvious descent, one node at a time."""
    path = [0]
    while len(path) <= max_depth:
        children = [j for j in range(length) if parents[j] == path[-1] and tokens[j] == sampled[path[-1]]]
        if not children:
            break
        path.append(children[0] + 1)
    return path


@pytest.mark.parametrize("seed", range(20))
def test_accept_equals_the_obvious_walk(seed: int) -> None:
    rng = random.Random(seed)
    b, m = rng.randint(1, 5), rng.randint(1, 12)
    chain = seed % 2 == 0
    parents = [list(range(m)) if chain else random_tree(rng, m) for _ in range(b)]
    max_depth = max(max(depths_of(p)) for p in parents)
    tokens = [[rng.randint(0, 2) for _ in range(m)] for _ in range(b)]
    lengths = [rng.randint(0, m) for _ in range(b)]
    sampled = [[rng.randint(0, 2) for _ in range(m + 1)] for _ in range(b)]
    nodes, counts, out = accept(
        torch.tensor(tokens), None if chain else torch.tensor(parents), lengths, torch.tensor(sampled), max_depth
    )
    assert nodes.shape == out.shape == (b, max_depth + 1)
    for s in range(b):
        path = walk(tokens[s], parents[s], lengths[s], sampled[s], max_depth)
        assert counts[s] == len(path) - 1
        assert nodes[s].tolist() == path + [path[-1]] * (max_depth + 1 - len(path))
        assert out[s, : len(path)].tolist() == [sampled[s][n] for n in path]


def test_a_padding_column_is_never_accepted() -> None:
    tokens = torch.tensor([[5, 6, 7]])
    sampled = torch.tensor([[5, 6, 7, 8]])
    for length in range(4):
        _, counts, out = accept(tokens, None, (length,), sampled)
        assert counts.tolist() == [length]
        assert out[0, length] == sampled[0, length]
    _, counts, out = accept(tokens[:, :0], None, (0,), sampled[:, :1])
    assert counts.tolist() == [0] and out.tolist() == [[5]]


@pytest.mark.parametrize("seed", range(10))
def test_ancestor_masks_and_paths_equal_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    m = rng.choice([1, 3, 9, 63])
    parents = [random_tree(rng, m) for _ in range(3)]
    tokens = [[rng.randint(0, 99) for _ in range(m)] for _ in range(3)]
    depth = max(max(depths_of(p)) for p in parents)
    masks = ancestor_mask(torch.tensor(parents))
    for given in (None, torch.tensor([depths_of(p) for p in parents])):
        paths = path_tokens(torch.tensor(tokens), torch.tensor(parents), given, depth)
        for s in range(3):
            for node in range(m + 1):
                line, at = [], node
                while at:
                    line.append(at)
                    at = parents[s][at - 1]
                bits = sum(1 << a for a in [0, *line])
                assert masks[s, node].item() % (1 << 64) == bits
                words = [tokens[s][a - 1] for a in reversed(line)]
                assert paths[s, node].tolist() == words + [-1] * (depth - len(words))


def test_a_chain_is_the_tree_of_one_branch() -> None:
    tokens = torch.randint(0, 9, (2, 63))
    parents = chain_parents(2, 63)
    assert torch.equal(ancestor_mask(parents)[0], chain_mask(63))
    assert torch.equal(path_tokens(tokens), path_tokens(tokens, parents, None, 63))
    sampled = torch.cat([tokens[:, :7], torch.randint(0, 9, (2, 57))], dim=1)
    for a, c in zip(accept(tokens, None, (63, 9), sampled), accept(tokens, parents, (63, 9), sampled), strict=True):
        assert torch.equal(a, c)


def test_sixty_five_nodes_do_not_fit_a_mask() -> None:
    with pytest.raises(ValueError, match="65 nodes"):
        ancestor_mask(chain_parents(1, 64))


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_compaction_moves_the_accepted_slots_of_every_layer(page_size: int) -> None:
    torch.manual_seed(0)
    pages, layers, width = 64 // page_size + 8, 3, 64 // page_size
    full = torch.randn(pages, layers, 2, 2, page_size, 4)
    table = torch.full((4, width), -1, dtype=torch.int32)
    order = torch.randperm(pages)[: 2 * (40 // page_size + 1)].reshape(2, -1).to(torch.int32)
    rows = torch.tensor([3, 1])
    table[rows, : order.shape[1]] = order
    kv = KVView(full, None, table, None, page_size)
    before = full.clone()
    start, nodes = torch.tensor([7, 13]), torch.tensor([[0, 3, 5, 9], [0, 2, 2, 2]])
    counts = [3, 1]

    def slot(tensor: torch.Tensor, row: int, at: int) -> torch.Tensor:
        return tensor[int(table[row, at // page_size]), :, :, :, at % page_size]

    compact_kv(kv, rows, start, nodes, ("full",))
    for s in range(2):
        row, first = int(rows[s]), int(start[s])
        for j in range(counts[s] + 1):
            assert torch.equal(slot(full, row, first + j), slot(before, row, first + int(nodes[s, j])))
        for at in range(first + 1):
            assert torch.equal(slot(full, row, at), slot(before, row, at))
    untouched = sorted(set(range(pages)) - set(order.flatten().tolist()))
    assert torch.equal(full[untouched], before[untouched])


def test_everything_runs_without_a_host_read_on_a_fake_cuda_device() -> None:
    with fake_cuda() as device:
        tokens = torch.zeros(2, 5, dtype=torch.int64, device=device)
        parents = torch.zeros(2, 5, dtype=torch.int64, device=device)
        sampled = torch.zeros(2, 6, dtype=torch.int64, device=device)
        for tree in (None, parents):
            nodes, counts, out = accept(tokens, tree, (5, 3), sampled, 3)
            assert nodes.shape == out.shape == (2, 4) and counts.device.type == "cuda"
        assert path_tokens(tokens, parents, None, 3).shape == (2, 6, 3)
        assert path_tokens(tokens).shape == (2, 6, 5)
        assert ancestor_mask(parents).shape == (2, 6)
        full = torch.zeros(8, 2, 2, 1, 4, 8, device=device)
        table = torch.zeros(4, 8, dtype=torch.int32, device=device)
        rows = torch.zeros(2, dtype=torch.int64, device=device)
        compact_kv(KVView(full, None, table, None, 4), rows, rows, nodes, ("full",))


# -- losslessness ----------------------------------------------------------------------------------------------------
# A target over V tokens whose distribution depends on the last two tokens. Decoding as many tokens through the verifier
# as a whole run and its bonus token are must give the joint distribution of plain sampling, whatever was drafted.

V, SAMPLES = 5, 200_000


def target_table() -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.softmax(1.5 * torch.randn(V, V, V, generator=generator), dim=-1)  # [before, last, next]


def drafts(kind: str) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """(tokens [m], parents or None, max depth): some likely, some not."""
    if kind in ("chain", "block"):
        m = 2 if kind == "chain" else 4
        return torch.tensor([1, 3, 0, 2][:m]), None, m
    return torch.tensor([1, 3, 0, 3, 2, 4]), torch.tensor([0, 0, 0, 1, 1, 2]), 2


def sample_nodes(
    table: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor | None, generator: torch.Generator, mask: bool
) -> torch.Tensor:
    """y ~ p at every node, [SAMPLES, m + 1]. `mask` forbids token 4, as a grammar would; the planted fault skips
    it on childless nodes, the rows a bonus token comes from."""
    m = len(tokens)
    line = torch.arange(m) if parents is None else parents
    last, before = [0], [0]
    for j in range(m):
        last.append(int(tokens[j]))
        before.append(last[int(line[j])])
    leaves = [node for node in range(m + 1) if not bool((line == node).any())]
    columns = []
    for node in range(m + 1):
        p = table[before[node], last[node]].clone()
        if not (mask is False and node in leaves):
            p[4] = 0.0
        columns.append(torch.multinomial(p / p.sum(), SAMPLES, replacement=True, generator=generator))
    return torch.stack(columns, dim=1)


def joint(table: torch.Tensor, length: int) -> torch.Tensor:
    """Exact distribution of the first `length` tokens, token 4 masked, [V^length]; the last token varies fastest."""
    masked = table.clone()
    masked[..., 4] = 0.0
    masked = masked / masked.sum(dim=-1, keepdim=True)
    p = torch.ones(1)
    before, last = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    for _ in range(length):
        p = (p[:, None] * masked[before, last]).reshape(-1)
        before, last = last.repeat_interleave(V), torch.arange(V).repeat(len(last))
    return p


def decode(kind: str, rule: str) -> tuple[torch.Tensor, int]:
    """(counts [V^length] of the first tokens of SAMPLES runs, length)."""
    table = target_table()
    generator = torch.Generator().manual_seed(11)
    tokens, parents, depth = drafts(kind)
    m, length = len(tokens), depth + 1
    sampled = sample_nodes(table, tokens, parents, generator, mask=rule != "unmasked bonus")
    batch = tokens.expand(SAMPLES, m)
    tree = None if parents is None else parents.expand(SAMPLES, m)
    _, counts, out = accept(batch, tree, torch.full((SAMPLES,), m), sampled, depth)
    if rule == "accept always":
        counts = torch.full_like(counts, depth)
        path = tokens[:depth] if parents is None else tokens[[0, 3]]
        leaf = sampled[:, depth if parents is None else 4]
        out = torch.cat([path.expand(SAMPLES, -1), leaf[:, None]], dim=1)
    produced = out[:, :length].clone()
    # finish runs that were cut short by plain sampling
    for at in range(length):
        last = produced[:, at - 1] if at else torch.zeros(SAMPLES, dtype=torch.int64)
        before = produced[:, at - 2] if at > 1 else torch.zeros(SAMPLES, dtype=torch.int64)
        p = table[before, last].clone()
        p[:, 4] = 0.0
        fresh = torch.multinomial(p, 1, generator=generator)[:, 0]
        produced[:, at] = torch.where(at <= counts, produced[:, at], fresh)
    code = torch.zeros(SAMPLES, dtype=torch.int64)
    for at in range(length):
        code = code * V + produced[:, at]
    return torch.bincount(code, minlength=V**length).to(torch.float64), length


def chi_squared_z(observed: torch.Tensor, p: torch.Tensor) -> float:
    """Pearson's statistic as a normal deviate (Wilson-Hilferty); infinite if an impossible outcome was seen.

    Outcomes expected less than five times count as one, as the approximation asks for."""
    possible = p > 0
    if bool((observed[~possible] > 0).any()):
        return math.inf
    expected, seen = p[possible].to(torch.float64) * SAMPLES, observed[possible]
    rare = expected < 5
    if bool(rare.any()):
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
        seen = torch.cat([seen[~rare], seen[rare].sum()[None]])
    statistic = float(((seen - expected) ** 2 / expected).sum())
    dof = len(expected) - 1
    return ((statistic / dof) ** (1 / 3) - (1 - 2 / (9 * dof))) / math.sqrt(2 / (9 * dof))


@pytest.mark.parametrize("kind", ["chain", "tree", "block"])
def test_the_rule_is_lossless_by_chi_squared(kind: str) -> None:
    observed, length = decode(kind, "right")
    assert chi_squared_z(observed, joint(target_table(), length)) < 3.5


@pytest.mark.parametrize("kind", ["chain", "tree", "block"])
@pytest.mark.parametrize("rule", ["accept always", "unmasked bonus"])
def test_the_chi_squared_test_rejects_wrong_rules(kind: str, rule: str) -> None:
    observed, length = decode(kind, rule)
    assert chi_squared_z(observed, joint(target_table(), length)) > 10
