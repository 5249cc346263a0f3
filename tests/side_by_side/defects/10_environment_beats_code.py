"""Settings in the code take precedence over the environment."""

import os

from accelerate import Accelerator
from show import show

os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = "8"
show("steps", Accelerator(gradient_accumulation_steps=2).gradient_accumulation_steps)
show("steps without code", Accelerator().gradient_accumulation_steps)
