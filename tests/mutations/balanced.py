"""Mutants of the layout that is balanced for the masks at hand, and of plans that count ids."""
# fmt: off

BALANCED = "ring/test_balanced.py"

MUTANTS = [
    (
        "_ring/balanced.py",
        BALANCED + " -k 'not ring_in'",
        [
            ("np.where(room == 0, np.inf, (load + work[:, c, None]).max(0))", "(load + work[:, c, None]).max(0)"),
            ("np.argsort(-work.max(0), kind=\"stable\")", "np.arange(chunks)"),
            ("if load[:, busiest].max() <= _GOAL:", "if True:"),
            ("load[:, owner[b]] += work[:, a] - work[:, b]", "load[:, owner[b]] += work[:, b] - work[:, a]"),
            ("here = (load[:, busiest, None, None] + more).max(0)", "here = (load[:, busiest, None, None] + more)[0]"),
            ("live.sum((0, 1, 3), dtype=np.int64)", "live.sum((0, 1, 2), dtype=np.int64)"),
            ("most = min(_LARGEST_CHUNK, max(own // _LEAST_CHUNKS, min(_LEAST_CHUNK, own)))", "most = own // _LEAST_CHUNKS"),
            ("(most := _greatest_load(work, found, n)) < least:", "(most := _greatest_load(work, found, n)) <= least:"),
            ("if least <= _UNEVEN:", "if True:"),
            ("and sizes[-1] > _LEAST_CHUNK:", "and sizes[-1] > 1:"),
            ("float((loads.max(1) / np.where(mean == 0, 1, mean)).max())", "float((loads.max(1) / np.where(mean == 0, 1, mean)).min())"),
            ("if n != len(self.held):", "if False:"),
        ],
    ),
    (
        "_ring/counts.py",
        BALANCED + " -k 'plan'",
        [
            ("live & more if isinstance(mask, And) else live | more", "live & more"),
            ("return anything, (name,)", "return anything, ()"),
            ("[(0, padding * (n > 1)) for n in x.shape[2:4]]", "[(0, padding) for n in x.shape[2:4]]"),
            ("positions.reshape(blocks, block)[:, [0, -1]]", "positions.reshape(blocks, block)[:, [0, 0]]"),
        ],
    ),
    (
        "_ring/plan.py",
        BALANCED + " -k 'plan or turn'",
        [
            ("// (varied * group)", "// group"),
            ("np.maximum(np.roll(begins, 1), np.roll(begins, -1))", "ends.max()"),
            ("begins = np.maximum(ends, np.maximum(np.roll(begins, 1), np.roll(begins, -1)))", "begins = np.maximum(np.roll(begins, 1), np.roll(begins, -1))"),
        ],
    ),
]
