"""The cost of many candidates (benchmarks/candidates.py)."""

from pathlib import Path

import candidates


def test_a_benchmark_of_many_candidates_has_as_many(tmp_path: Path) -> None:
    result = candidates.measure(tmp_path, 1000, spot=True, every=True, repeat=1)
    assert result.candidates == 1000 and 0 < result.cpu < 60 and 50 < result.memory < 1000
    assert candidates.make_run(tmp_path / "few", candidates.ORDINARY_COUNT, spot=False).read_spec().search.nodes == [
        1,
        2,
        4,
        8,
    ]
