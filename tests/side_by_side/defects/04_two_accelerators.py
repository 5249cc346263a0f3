"""A second Accelerator does not change the accumulation of the first one."""

from accelerate import Accelerator
from show import show

first = Accelerator(gradient_accumulation_steps=4)
second = Accelerator()
show("steps of the first", first.gradient_accumulation_steps)
show("steps of the second", second.gradient_accumulation_steps)
