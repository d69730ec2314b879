"""Checkpoints of a run, written and read by all ranks, in reading order.

parts           the tensors that a rank holds, in global coordinates
manifest        the one file that describes a checkpoint
tensor_file     a memory-mapped safetensors file
checksums       hashes of files
snapshot        copies of the tensors, taken while steps wait
writer          one rank's file, in one pass
commit          the atomic step that makes files a checkpoint
local_work      work of one rank at once or beside the steps, with its error
save            a save by all ranks
load            a load under the same layout or another
catalog         the checkpoints in a folder
retention       rules that decide which checkpoints stay
compare         differences of two checkpoints
nodes           ranks that share a node, and nodes that keep copies
file_exchange   files that travel to other nodes beside the steps
node_folder     a run's folder on a node's own disk or in its memory
local_copies    copies of the state on the nodes' own disks
"""
