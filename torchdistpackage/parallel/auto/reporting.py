"""The logger of automatic tensor parallelism, to which notes on plans go."""

import logging

LOG = logging.getLogger(__name__.rpartition(".")[0])
