"""Cuts of a model into stages, and the stages themselves.

The files in reading order: cost_split (stages of equal cost) on cut_search; layer_costs (costs of
layers, estimated or measured); policies (cuts by name); sequential (a model as a list of layers,
and its stages); fx_split (cuts found by torch.fx); hf_decoder (Hugging Face decoders) on
gated_blocks (inputs and outputs of a stage's blocks).
"""
