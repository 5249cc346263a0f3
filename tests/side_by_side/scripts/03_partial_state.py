"""Inference without an Accelerator: PartialState."""

import torch
from accelerate import PartialState
from show import line, show

state = PartialState(cpu=True)

show("device", str(state.device))
show("backend", state.backend)
show("distributed_type", state.distributed_type)
show("num_processes", state.num_processes)
show("process_index", state.process_index)
show("local_process_index", state.local_process_index)
show("debug", state.debug)
show("fork_launched", bool(state.fork_launched))
show("initialized", state.initialized)
show("use_distributed", state.use_distributed)
show("is_main_process", state.is_main_process)
show("is_local_main_process", state.is_local_main_process)
show("is_last_process", state.is_last_process)
show("default_device", str(state.default_device))
state.set_device()

prompts = ["a dog", "a cat", "a bird"]
with state.split_between_processes(prompts) as mine:
    show("mine", mine)
with state.split_between_processes(prompts, apply_padding=True) as mine:
    show("mine, padded", mine)
with state.split_between_processes({"ids": [1, 2, 3], "names": ["x", "y", "z"]}) as mine:
    show("mine of a dict", mine)
with state.split_between_processes(torch.arange(5)) as mine:
    show("mine of a tensor", mine)

who = []
state.on_main_process(lambda: who.append("main"))()
state.on_local_main_process(lambda: who.append("local main"))()
state.on_last_process(lambda: who.append("last"))()
state.on_process(lambda: who.append("number 1"), process_index=1)()
state.on_local_process(lambda: who.append("local number 0"), local_process_index=0)()


@state.on_main_process
def tell():
    who.append("decorated")


tell()
with state.main_process_first():
    who.append("first or second")
with state.local_main_process_first():
    who.append("first or second here")
show("who", who)
state.print(line("printed", "once"))
state.wait_for_everyone()
state.destroy_process_group()
show("group is gone", not torch.distributed.is_initialized())
