"""get_logger: which ranks log, and in which order."""

import logging
import os
import sys

from accelerate import Accelerator
from accelerate.logging import get_logger
from show import show

logging.basicConfig(stream=sys.stdout, format='> %(name)s:%(levelname)s = "%(message)s"')
accelerator = Accelerator()

logger = get_logger("tour", log_level="INFO")
logger.info("the main process only")
logger.info("everybody", main_process_only=False)
logger.info("in order", main_process_only=False, in_order=True)
logger.debug("below the level")
logger.error("%s arguments", "with")
for _ in range(3):
    logger.warning_once("once only")
show("level", logger.logger.level)

os.environ["ACCELERATE_LOG_LEVEL"] = "ERROR"
quiet = get_logger("quiet")
quiet.warning("not heard")
quiet.error("heard")
show("level from the environment", quiet.logger.level)
