"""What the experiments' commands share: plans of runs, their records gathered, tables and figures made of them."""
