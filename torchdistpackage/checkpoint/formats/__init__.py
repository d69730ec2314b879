"""Conversion of checkpoints to and from other formats, in one process, one tensor at a time.

table     the formats, a row each
source    named tensors that are read on demand; a checkpoint of ours is one source
names     translation between our names and theirs, by a mapping file
importing writes a source as a checkpoint of ours
files     safetensors and torch's .pt, and the files of `get_mp_ckpt_suffix`
dcp       folders of torch.distributed.checkpoint
"""
