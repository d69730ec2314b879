"""Steps of optimizers over ranks, in reading order.

clip          the gradient norm of a model, and clipping by it
muon          Muon for matrices that are whole, fused, stacked or split
scaler        loss scaling for float16, with one decision for all ranks
torch_calls   torch's own clipping, scaler and optimizers on split parameters
"""
