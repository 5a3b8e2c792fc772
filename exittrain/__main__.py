"""`python -m exittrain`, which launchers use: `deepspeed --num_gpus 2 --module exittrain train recipe.yaml`."""

from exittrain.cli.main import main

if __name__ == "__main__":
    main()
