"""Node lists in SLURM's short form and the names they stand for, as `scontrol show hostnames` gives them."""

NODE_LISTS = {
    "n1": ["n1"],
    "n[1-2]": ["n1", "n2"],
    "n[01-03,07]": ["n01", "n02", "n03", "n07"],
    "a1,b[2-3]": ["a1", "b2", "b3"],
    "gpu-[1-2]-[3-4]": ["gpu-1-3", "gpu-1-4", "gpu-2-3", "gpu-2-4"],
    "n[008-011],m5": ["n008", "n009", "n010", "n011", "m5"],
    "n[9-11]": ["n9", "n10", "n11"],
    "n[3,1],n1": ["n3", "n1", "n1"],
    "node.example.org,x-2": ["node.example.org", "x-2"],
    "": [],
}
