"""What a step will cost: layers, links, rates of codecs; and what to make of it while training."""
