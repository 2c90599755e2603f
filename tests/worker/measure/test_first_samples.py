"""The first samples of a job, if the lengths of samples differ between parts of the training set."""

import pytest
import torch
from read_diagnostics import values
from token_jobs import make_token_job

from tula_cli.worker.build.data import build_datasets
from tula_cli.worker.build.samples import SeededDataset
from tula_cli.worker.measure.first_samples import load_first_samples


@pytest.mark.parametrize(("size", "taken"), [(10, 10), (256, 256), (300, 256), (511, 256), (1000, 256)])
def test_samples_are_of_all_parts_of_the_dataset(size: int, taken: int) -> None:
    result = SeededDataset([(torch.zeros(1), index) for index in range(size)], seed=0).list_spread_samples(256)  # type: ignore[arg-type]
    indices = [index for _, index in result]
    assert len(set(indices)) == len(indices) == taken
    assert max(b - a for a, b in zip(indices, [*indices[1:], size], strict=True)) <= -(-size // 256)


def test_the_share_of_padding_and_the_longest_sample_are_of_the_whole_set() -> None:
    spec = make_token_job(dataset={"args": {"size": 400}})
    datasets = build_datasets(spec)
    sentences = datasets.train.samples
    sentences.ids = [torch.ones(9 if index < 360 else 90, dtype=torch.int64) for index in range(400)]  # type: ignore[attr-defined]
    first_samples = load_first_samples(spec, datasets)
    assert len(first_samples.item["ids"]) == 90
    padding = values(first_samples.warnings, "samples-differ-in-shape")
    assert (padding["padding"], padding["padded"]) == (82, 32)  # 29 of 9 words and 3 of 90, in 32 x 90
