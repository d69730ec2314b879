"""Layouts of parameters as plain data, and what follows from them, in reading order.

layout      how one parameter is split over ranks
partition   rules that divide lengths and parameters among ranks
derive      slices, owners, gradient sums and groups of one rank
mark        layouts that modules declare, on their parameters
table       how tensor ranks split the layers of a model
moe         sizes of a mixture of experts
balances    how experts are kept equally busy
exchanges   how context ranks exchange a sequence, and the bytes of each way
rope        settings of rotary positions
four_bit    sizes and cuts of 4-bit weights
"""
