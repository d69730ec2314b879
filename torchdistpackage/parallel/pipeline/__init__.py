"""Pipeline parallelism: stages on several ranks, microbatches that pass through them.

To read in this order.

What it computes  reference: GPipe in 40 lines, which tests hold Pipeline to.
What users call   pipeline (`Pipeline`, for loops of your own), forward_backward (for functions)
                  with function_call and kept (what stays from call to call).
                  Under both: order (which schedule), own_stages, stage_call and one_pass (what a
                  stage is called with), microbatches, losses and dividing (means, sums and counts),
                  agreement (mistakes, before anything is sent), interrupted (groups whose messages
                  are lost), envelope (skips), reducing and ties (gradients over replicas and
                  stages).
The executor      executor (runs one rank's program), steps (the program as bound functions),
                  local_stage, boundary (what crosses between stages), clock, recording.
Backwards         split_backward (I and W) on backward_graph and weight_gradients; reduction (tells
                  the reducer which backward is the last).
Where to cut      split (on costs, on paper) by cut_search, piece_cost, profile (measured),
                  partition (policies by name), flatten, stage (a Sequential), traced (by
                  torch.fx), hugging_face with fewer_blocks.
By hand           p2p with moves and tensor_parts: messages under the names of the earlier package.
"""
