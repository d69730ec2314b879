"""The earlier library's way to split a module: a plan of rules, and shards made from it.

rules, actions, ops      a plan as data: what is cut, and what is sent around a layer
family_plan, layerwise   plans that are made: of a family's table, or layer by layer (pairs)
shard, wrapper           one shard of a module: its parameters cut, its layers wrapped
model, hugging_face      the shards as one module, or as a model of transformers
verify, explain          the first forward compared with the unsplit module's; a plan as a table
"""
