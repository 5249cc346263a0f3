"""The attributes of an Accelerator that describe its process."""

from accelerate import Accelerator
from show import line, show

accelerator = Accelerator(cpu=True, mixed_precision="no")

show("device", str(accelerator.device))
show("num_processes", accelerator.num_processes)
show("process_index", accelerator.process_index)
show("local_process_index", accelerator.local_process_index)
show("is_main_process", accelerator.is_main_process)
show("is_local_main_process", accelerator.is_local_main_process)
show("is_last_process", accelerator.is_last_process)
show("use_distributed", accelerator.use_distributed)
show("distributed_type", accelerator.distributed_type)
show("distributed_type is", accelerator.distributed_type == "MULTI_CPU")
show("distributed_type value", accelerator.distributed_type.value)
show("mixed_precision", accelerator.mixed_precision)
show("sync_gradients", accelerator.sync_gradients)
show("gradient_accumulation_steps", accelerator.gradient_accumulation_steps)
show("optimizer_step_was_skipped", accelerator.optimizer_step_was_skipped)

state = accelerator.state
show("state.num_processes", state.num_processes)
show("state.process_index", state.process_index)
show("state.local_process_index", state.local_process_index)
show("state.is_main_process", state.is_main_process)
show("state.is_local_main_process", state.is_local_main_process)
show("state.is_last_process", state.is_last_process)
show("state.mixed_precision", state.mixed_precision)
show("state.distributed_type", state.distributed_type)
show("state.device", str(state.device))
show("state.use_distributed", state.use_distributed)

accelerator.print(line("printed", "once on this machine"))
accelerator.wait_for_everyone()

order = []
with accelerator.main_process_first():
    order.append(accelerator.process_index)
with accelerator.local_main_process_first():
    order.append(accelerator.local_process_index)
show("went through both blocks", order)
