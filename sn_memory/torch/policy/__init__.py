"""Plans as selective-checkpoint policies: what blocks save under torch's own checkpointing."""
