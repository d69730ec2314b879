"""Checkpoints in the formats of others, by one process that holds one tensor at a time.

source    what is read: named tensors, each read when it is asked for; a checkpoint of ours is one
names     ours and theirs, by a mapping file
importing a source as a checkpoint of ours
files     safetensors and torch's .pt, and the files of `get_mp_ckpt_suffix`
dcp       folders of torch.distributed.checkpoint
"""
