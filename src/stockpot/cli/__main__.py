from stockpot.cli import main

main()
