import pytest

from tula_cli.models.queue.result_time import Ask, chain_links, links_wait


@pytest.mark.parametrize(
    ("minutes", "limit", "restart", "links"),
    [(60, 60, 0, 1), (61, 60, 0, 2), (180, 60, 0, 3), (180, 60, 20, 4), (59, 60, 5, 1)],
)
def test_links_that_a_training_takes(minutes: float, limit: float, restart: float, links: int) -> None:
    assert chain_links(minutes, limit, restart=restart) == links


def test_every_link_waits() -> None:
    assert links_wait(Ask(4, 60, 3), 100.0, 40.0) == 180.0
    assert links_wait(Ask(4, 60, 1), 100.0, 40.0) == 100.0
