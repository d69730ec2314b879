"""Where a model is cut into stages, and the stages that come of it.

cost_split (stages of equal cost) on cut_search, layer_costs (what layers cost, estimated or
measured), policies (by name), sequential (a model as a list of layers, and its stages), fx_split
(cuts found by torch.fx), hf_decoder (decoders of Hugging Face) on
gated_blocks (what enters and leaves a stage's blocks).
"""
