"""CheckpointTree: the recurrent states that are kept under the hash of the block where they end. No I/O.

A checkpoint's parent is the longest one that it begins with, so chains of checkpoints share what their prompts share. A state
takes much memory, and only the deepest one of a prefix is hit, so what is evicted first matters: those that running sequences
left while decoding, then those in the interior of a chain (one child), then its ends and the places where chains fork; each the
least recently used first. A chain has at most MAX_CHAIN. Only States (states.py) changes the tree, and it owns the states' ids.
"""

from collections import OrderedDict
from collections.abc import Iterator

from quire.enginecore.kv.pool import BlockHash

MAX_CHAIN = 32  # checkpoints that one prefix has


class Checkpoint:
    __slots__ = ("children", "depth", "hashes", "is_newest", "num_children", "parent", "refs", "state")

    def __init__(self, state: int, hashes: list[BlockHash], depth: int, parent: "Checkpoint | None"):
        self.state = state
        self.hashes = hashes  # of the blocks of a sequence that begins with it; more may follow
        self.depth = depth  # blocks
        self.parent = parent
        self.children: dict[BlockHash, dict[Checkpoint, None]] = {}  # by the hash of the block that follows it
        self.num_children = 0
        self.refs = 0  # sequences that read it in the step being made
        self.is_newest = False  # the one that a running sequence left last, while decoding

    @property
    def block_hash(self) -> BlockHash:
        return self.hashes[self.depth - 1]


Order = OrderedDict[Checkpoint, None]  # least recently used first


class CheckpointTree:
    def __init__(self) -> None:
        self._root = Checkpoint(0, [], 0, None)
        self._by_hash: dict[BlockHash, Checkpoint] = {}
        self._newest, self._interior, self._ends = Order(), Order(), Order()  # without references

    def __len__(self) -> int:
        return len(self._by_hash)

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self._by_hash.values())

    @property
    def num_evictable(self) -> int:
        return len(self._newest) + len(self._interior) + len(self._ends)

    def find(self, block_hash: BlockHash) -> Checkpoint | None:
        return self._by_hash.get(block_hash)

    def deepest(self, hashes: list[BlockHash], most: int, every: int) -> Checkpoint | None:
        """The longest one that ends at most after `most` of these blocks; all end at multiples of `every` blocks."""
        for depth in range(most // every * every, 0, -every) if self._by_hash else ():
            if (found := self._by_hash.get(hashes[depth - 1])) is not None:
                return found
        return None

    # ---------------------------------------------------------------------------------------------------- changes
    def add(self, state: int, hashes: list[BlockHash], depth: int, every: int) -> tuple[Checkpoint, list[Checkpoint]]:
        """Keep a state that ends after hashes[:depth], of which no other is kept. Returns the checkpoint, and those that were
        given up for it, or it itself, because a chain is full."""
        parent = self.deepest(hashes, depth - 1, every) or self._root
        node = Checkpoint(state, hashes, depth, parent)
        beside = parent.children.get(hashes[parent.depth], {})
        behind = [c for c in beside if c.depth > depth and c.hashes[depth - 1] == node.block_hash]
        self._by_hash[node.block_hash] = node
        for child in behind:
            self._unlink(child)
            self._link(child, node)
        self._link(node, parent)
        self._file(node)
        given_up = []
        while len(chain := self._longest_chain(node)) > MAX_CHAIN:
            given_up.append(self._least_useful(chain, node))
            self.remove(given_up[-1])
        self._refile(parent)
        return node, given_up

    def remove(self, node: Checkpoint) -> None:
        """Forget a checkpoint."""
        del self._by_hash[node.block_hash]
        self._take_out(node)
        parent = node.parent
        assert parent is not None
        self._unlink(node)
        for child in [c for some in node.children.values() for c in some]:
            self._unlink(child)
            self._link(child, parent)
        self._refile(parent, is_old=True)

    def pop(self, *, spares_newest: bool) -> Checkpoint | None:
        """Evict one without references, if there is one. spares_newest: not one that a running sequence has left."""
        for order in (self._interior, self._ends) if spares_newest else (self._newest, self._interior, self._ends):
            if order:
                node = next(iter(order))
                self.remove(node)
                return node
        return None

    def refer(self, node: Checkpoint) -> None:
        """It must not be evicted until `release`."""
        self._take_out(node)
        node.refs += 1

    def release(self, node: Checkpoint) -> None:
        node.refs -= 1
        self._file(node)

    def mark_newest(self, node: Checkpoint, is_newest: bool) -> None:
        self._take_out(node)
        node.is_newest = is_newest
        self._file(node)

    def holds(self, node: Checkpoint) -> bool:
        """Whether it was not removed."""
        return self._by_hash.get(node.block_hash) is node

    # --------------------------------------------------------------------------------------------------- internals
    def _longest_chain(self, node: Checkpoint) -> list[Checkpoint]:
        """The checkpoints of the longest chain through this one, the deepest first."""
        chain, at = [], node
        while at.parent is not None:
            chain.append(at)
            at = at.parent
        below: list[Checkpoint] = []
        paths = [[child] for some in node.children.values() for child in some]
        while paths:
            below = paths[0]
            paths = [[*path, child] for path in paths for some in path[-1].children.values() for child in some]
        return [*reversed(below), *chain]

    def _least_useful(self, chain: list[Checkpoint], new: Checkpoint) -> Checkpoint:
        """The one between whose neighbors the fewest tokens lie, rather not a fork; not the new one, an end, or one that is
        being read."""
        depths = [*(node.depth for node in chain), 0]
        inner = [i for i, node in enumerate(chain) if i and node is not new and not node.refs]
        at = min(inner, key=lambda i: (chain[i].num_children > 1, depths[i - 1] - depths[i + 1]), default=0)
        return chain[at]

    def _link(self, node: Checkpoint, parent: Checkpoint) -> None:
        node.parent = parent
        parent.children.setdefault(node.hashes[parent.depth], {})[node] = None
        parent.num_children += 1

    def _unlink(self, node: Checkpoint) -> None:
        parent = node.parent
        assert parent is not None
        key = node.hashes[parent.depth]
        del parent.children[key][node]
        if not parent.children[key]:
            del parent.children[key]
        parent.num_children -= 1

    def _order_of(self, node: Checkpoint) -> Order:
        return self._newest if node.is_newest else self._interior if node.num_children == 1 else self._ends

    def _take_out(self, node: Checkpoint) -> None:
        for order in (self._newest, self._interior, self._ends):
            order.pop(node, None)

    def _file(self, node: Checkpoint) -> None:
        if not node.refs and self.holds(node):
            self._order_of(node)[node] = None

    def _refile(self, node: Checkpoint, *, is_old: bool = False) -> None:
        """Its number of children has changed: by a new one, or, is_old, because the least recently used of them went."""
        order = self._order_of(node)
        if node is self._root or node.refs or node in order:
            return
        self._take_out(node)
        order[node] = None
        if is_old:
            order.move_to_end(node, last=False)

    def check(self) -> None:
        """Assert that the tree is one, and that each checkpoint without references can be evicted."""
        for block_hash, node in self._by_hash.items():
            assert node.block_hash == block_hash and node.parent is not None
            assert node.parent is (self.deepest(node.hashes, node.depth - 1, 1) or self._root)
            assert node in node.parent.children[node.hashes[node.parent.depth]]
            assert [node in order for order in (self._newest, self._interior, self._ends)].count(True) == (not node.refs)
            assert node.refs or node in self._order_of(node)
            assert len(self._longest_chain(node)) <= MAX_CHAIN
        for node in (self._root, *self._by_hash.values()):
            assert node.num_children == sum(map(len, node.children.values()))
            assert all(child.parent is node for some in node.children.values() for child in some)
