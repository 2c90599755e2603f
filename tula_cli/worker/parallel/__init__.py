"""How many ranks train one model: each with a copy of it, or each with its share."""
