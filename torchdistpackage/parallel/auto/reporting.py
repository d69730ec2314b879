"""The logger of automatic tensor parallelism, which receives notes on plans."""

import logging

LOG = logging.getLogger(__name__.rpartition(".")[0])
