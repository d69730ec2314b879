"""Layers split over the ranks of a tensor group, in reading order.

layouts             how the parameters of each layer are cut
marked              the base of modules that declare these cuts
init                initial weights that do not depend on the layout
product_gradients   products of several weights with one input, and their gradients
chunked             gathers and reduce-scatters in chunks, which overlap products
column_product      products of a column layer
row_product         products of a row layer
linear              column and row layers, and the MLP of both
sharing             heads that several ranks share
attention           self-attention with split heads, and rotary positions
norm, dropout       layers between these
embedding           tables split by vocabulary or features
loss_terms          the parts of a cross entropy over split logits
cross_entropy       the losses; traced_loss has them for graphs
full                layers from whole tensors, and back
float8, four_bit    products in fewer bits
parallelize         replacement of layers in a foreign model
lookup, stacked     embeddings and experts of foreign models
weight_reads        whole weights for code that reads them outside of a layer
"""
