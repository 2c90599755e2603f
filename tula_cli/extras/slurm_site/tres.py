"""Trackable resources (TRES) in SLURM's notation, and the billing computed from their weights.

Billing is the sum of weight x count over the allocated resources. With PriorityFlags=MAX_TRES it is the largest of the
products of a node's resources (cpu, mem, node, gres) plus the sum of those of no node (licenses); with MAX_TRES_GRES
(SLURM 24.05) the largest of cpu, mem and node plus the sum of gres and the rest. Without weights it is the number of
CPUs.
"""

import math
import re
from collections.abc import Mapping
from typing import Literal

from tula_cli.spec.schedules import RELATIVE_TOLERANCE

Tres = Mapping[str, float]
"""Counts by name ("cpu", "mem" in MB, "node", "gres/gpu", "gres/gpu:a100", "license/matlab")."""

BillingRule = Literal["sum", "max", "max_gres"]

_MEGABYTE_UNITS = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2, "P": 1024.0**3, "E": 1024.0**4}
_COUNT_UNITS = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_NODE_TRES = ("cpu", "mem", "node")


def parse_tres(text: str) -> dict[str, float]:
    """Parse counts in SLURM's notation, "cpu=4,mem=3000M,gres/gpu:a100=4"; entries without a number are left out."""
    counts = {}
    for entry in text.split(","):
        name, _, value = entry.strip().rpartition("=")
        if (count := parse_count(name.lower(), value)) is not None:
            counts[name.lower()] = count
    return counts


def parse_count(name: str, text: str) -> float | None:
    """Parse one count, memory in MB; return None if it is not a number ("N", "UNLIMITED")."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGTPE]?)B?", text.strip().upper())
    if match is None or not name:
        return None
    return float(match[1]) * _get_unit_size(name, match[2])


def parse_weights(text: str) -> dict[str, float]:
    """Parse TRESBillingWeights, "CPU=1.0,Mem=0.25G,GRES/gpu:a100=2.0"; the weight of memory is returned per MB.

    A suffix is the unit that the weight applies to: 0.25G means 0.25 per GB.
    """
    weights = {}
    for entry in text.split(","):
        name, _, value = entry.strip().rpartition("=")
        match = re.fullmatch(r"(-?\d*\.?\d+(?:[eE][-+]?\d+)?)([KMGTPE]?)B?", value.strip(), re.IGNORECASE)
        if name and match:
            weights[name.lower()] = float(match[1]) / _get_unit_size(name.lower(), match[2].upper())
    return weights


def _get_unit_size(name: str, unit: str) -> float:
    """Return the size of a unit (K, M ...) of a TRES, in MB of memory; 1 without a unit."""
    units = _MEGABYTE_UNITS if name == "mem" or name.startswith("bb/") else _COUNT_UNITS
    return units.get(unit, 1.0)


def parse_billing_rule(flags: str) -> BillingRule:
    """Return the billing rule that PriorityFlags selects."""
    words = re.split(r"[,\s]+", flags.upper())
    return "max" if "MAX_TRES" in words else "max_gres" if "MAX_TRES_GRES" in words else "sum"


def compute_billing(tres: Tres, weights: Tres, rule: BillingRule) -> float:
    """Return the billing of allocated resources, before SLURM truncates it to a whole number.

    `weights` are those of `parse_weights`; if the partition has none, CPUs are counted.
    """
    if not weights:
        return tres.get("cpu", 0.0)
    products = {name: weight * tres.get(name, 0.0) for name, weight in weights.items() if name != "billing"}
    if rule == "sum":
        return sum(products.values())
    alternatives = {name for name in products if name in _NODE_TRES or (rule == "max" and name.startswith("gres/"))}
    max_product = max((products[name] for name in alternatives), default=0.0)
    return max(0.0, max_product) + sum(value for name, value in products.items() if name not in alternatives)


def truncate_billing(value: float) -> int:
    """Truncate a billing to a whole number, as SLURM stores it for a job (AllocTRES)."""
    return math.floor(value * (1 + RELATIVE_TOLERANCE))
