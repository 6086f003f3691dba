"""How many tokens the gated delta rule takes at once; apart, since prices need it and load no torch."""

#: Tokens of a chunk by the dims of the decays: 3 where a head has one, 4 where each entry of a key has its own. Of
#: these the pairs of tokens are weighed entry by entry, which takes as many passes over a chunk as it has tokens.
CHUNKS = {3: 64, 4: 16}
