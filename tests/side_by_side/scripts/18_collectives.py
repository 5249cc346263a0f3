"""The operations of accelerate.utils, on nested data and objects."""

from collections import namedtuple

import torch
from accelerate import PartialState
from accelerate.utils import (
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
    send_to_device,
)
from show import show

state = PartialState(cpu=True)
rank = state.process_index
Pair = namedtuple("Pair", ["left", "right"])

nested = {
    "a": torch.tensor([rank, 10 + rank]),
    "b": [torch.full((1, 2), float(rank))],
    "c": Pair(torch.ones(1), torch.zeros(1)),
}
both = gather(nested)
show("gather", [both["a"].tolist(), both["b"][0].tolist(), both["c"].left.tolist(), type(both["c"]).__name__])
show("gather_object", gather_object([{"rank": rank}, "text"]))
show("gather_object of a ragged list", gather_object(list(range(rank + 1))))

show("broadcast", broadcast(torch.tensor([1.0 + rank])))
show("broadcast from the last", broadcast(torch.tensor([1.0 + rank]), from_process=state.num_processes - 1))
show("broadcast_object_list", broadcast_object_list([rank, {"from": rank}]))
show("from the last", broadcast_object_list([rank], from_process=state.num_processes - 1))

show("reduce by default", reduce(torch.tensor([2.0 * rank + 1, 1.0])))
show("reduce sum", reduce(torch.tensor([2.0 * rank + 1, 1.0]), reduction="sum"))
show("reduce none", reduce(torch.tensor([2.0 * rank + 1, 1.0]), reduction="none"))
show("reduce scaled", reduce({"x": torch.tensor([2.0 * rank + 1])}, reduction="mean", scale=3.0)["x"])

ragged = torch.full((rank + 1, 2), rank + 1)
show("pad", pad_across_processes(ragged))
show("pad first", pad_across_processes(ragged, dim=0, pad_index=-1, pad_first=True))
show("pad another dim", pad_across_processes(ragged.T.contiguous(), dim=1, pad_index=7))

sent = send_to_device(
    {"x": torch.ones(2), "keep": [torch.zeros(1), "text"], "n": 3}, state.device, non_blocking=True, skip_keys=["keep"]
)
show("send_to_device", [str(sent["x"].device), sent["keep"][1], sent["n"]])
show("tuple stays", type(send_to_device(Pair(torch.ones(1), 2), "cpu")).__name__)
