"""Prints a result for the runner: a name, and the value as JSON."""

import json


def show(name, value):
    print(line(name, value), flush=True)


def line(name, value):
    return f"> {name} = {json.dumps(value, default=_plain)}"


def _plain(value):
    if hasattr(value, "full_tensor"):  # a DTensor of fully_shard; all ranks print the same values in the same order
        value = value.full_tensor()
    return value.tolist() if hasattr(value, "tolist") else str(value)
