import numpy as np

from tula_cli.models.choice.candidates import apply_to_distinct_values, compute_ratio_distances, find_nearest_columns


def test_of_equally_near_ones_the_next_distance_decides_then_the_order() -> None:
    far = np.array([[1.0, 2.0, 1.0], [3.0, 3.0, 3.0], [5.0, 4.0, 6.0]])
    further = np.array([[9.0, 0.0, 8.0], [1.0, 1.0, 2.0], [0.0, 9.0, 0.0]])
    assert find_nearest_columns(far, further).tolist() == [2, 0, 1]


def test_half_is_as_near_as_double() -> None:
    assert compute_ratio_distances([3, 6, 12], np.array([6, 9])).tolist() == [[2.0, 1.0, 2.0], [3.0, 1.5, 12 / 9]]


def test_a_value_is_asked_for_once() -> None:
    requests = []
    assert apply_to_distinct_values(lambda item: requests.append(item) or item**2, np.array([3, 2, 3, 3])).tolist() == [
        9,
        4,
        9,
        9,
    ]  # type: ignore[func-returns-value]
    assert requests == [2, 3]
