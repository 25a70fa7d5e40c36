"""Train a LLaMA with core attention disaggregation: ``python pretrain_llama.py --config configs/tiny.yaml``.

``--help`` lists every setting. ``pretrain_llama.sh`` starts it on all ranks.
"""

from distca.train.run.main import main

if __name__ == "__main__":
    main()
