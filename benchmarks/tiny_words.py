"""The words of the tiny model's text: closed sets (capitals, months, facts), and phrasings of questions.

Phrasings have slots in braces. Pure data, except for `phrase`, which fills the slots, and `is_held_out`.
"""

# ruff: noqa: SIM905 (a list of words reads best as words)
import hashlib

HELD_OUT_ONE_IN = 8
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
MONTH_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
NUMBER_WORDS = "zero one two three four five six seven eight nine ten eleven twelve".split()
CAPITALS = dict(
    pair.split(":")
    for pair in (
        "France:Paris,Germany:Berlin,Italy:Rome,Spain:Madrid,Portugal:Lisbon,Austria:Vienna,Belgium:Brussels,Greece:Athens,"
        "Norway:Oslo,Sweden:Stockholm,Finland:Helsinki,Denmark:Copenhagen,Iceland:Reykjavik,Ireland:Dublin,Poland:Warsaw,"
        "Hungary:Budapest,Romania:Bucharest,Bulgaria:Sofia,Serbia:Belgrade,Croatia:Zagreb,Slovenia:Ljubljana,Estonia:Tallinn,"
        "Latvia:Riga,Lithuania:Vilnius,Ukraine:Kyiv,Russia:Moscow,Turkey:Ankara,Egypt:Cairo,Morocco:Rabat,Tunisia:Tunis,"
        "Algeria:Algiers,Kenya:Nairobi,Ghana:Accra,Ethiopia:Addis Ababa,Senegal:Dakar,Uganda:Kampala,Angola:Luanda,"
        "Namibia:Windhoek,Zambia:Lusaka,Japan:Tokyo,China:Beijing,India:New Delhi,Thailand:Bangkok,Vietnam:Hanoi,"
        "Indonesia:Jakarta,Mongolia:Ulaanbaatar,Nepal:Kathmandu,Pakistan:Islamabad,Iran:Tehran,Iraq:Baghdad,Jordan:Amman,"
        "Lebanon:Beirut,Qatar:Doha,Canada:Ottawa,Mexico:Mexico City,Cuba:Havana,Jamaica:Kingston,Peru:Lima,Chile:Santiago,"
        "Argentina:Buenos Aires,Brazil:Brasilia,Colombia:Bogota,Ecuador:Quito,Uruguay:Montevideo,Paraguay:Asuncion,"
        "Australia:Canberra,New Zealand:Wellington,South Korea:Seoul,the United States:Washington,"
        "the United Kingdom:London,the Netherlands:Amsterdam,the Philippines:Manila,Venezuela:Caracas,Malaysia:Kuala Lumpur"
    ).split(",")
)
CITIES = tuple(CAPITALS.values())
OTHER_CITIES = tuple(
    (
        "Munich,Hamburg,Cologne,Frankfurt,Milan,Naples,Venice,Turin,Florence,Barcelona,Seville,Valencia,Bilbao,Porto,Lyon,Nice,"
        "Marseille,Lille,Geneva,Zurich,Basel,Salzburg,Krakow,Gdansk,Prague,Bergen,Malmo,Aarhus,Cork,Leeds,Bristol,Oxford,Glasgow,"
        "Manchester,Liverpool,Boston,Chicago,Seattle,Denver,Dallas,Houston,Miami,Atlanta,Detroit,Phoenix,Portland,New York,"
        "Los Angeles,San Francisco,Toronto,Montreal,Vancouver,Sydney,Melbourne,Perth,Brisbane,Auckland,Mumbai,Delhi,Kolkata,"
        "Karachi,Lahore,Dubai,Istanbul,Tel Aviv,Saint Petersburg,Shanghai,Hong Kong,Osaka,Kyoto,Busan,Lagos,Cape Town,"
        "Rio de Janeiro"
    ).split(",")
)
GROUPS = {
    "animal": "dog cat horse cow pig sheep goat lion tiger bear wolf fox rabbit mouse elephant monkey zebra camel frog snake "
    "duck eagle owl shark whale turtle otter panda deer",
    "fruit": "apple banana pear grape lemon cherry peach plum mango melon kiwi fig strawberry",
    "vegetable": "carrot potato onion cabbage spinach pea bean garlic lettuce broccoli",
    "color": "red blue green yellow purple black white brown pink gray",
    "vehicle": "car bus train truck bicycle ship boat plane tram van taxi",
    "tool": "hammer saw drill wrench shovel axe rake ladder",
    "instrument": "piano guitar violin drum flute trumpet harp cello",
    "garment": "shirt hat coat sock shoe glove scarf jacket dress skirt",
}
GROUP_OF = {word: group for group, words in GROUPS.items() for word in words.split()}
WORDS = tuple(
    sorted(
        set(GROUP_OF)
        | set(
            "air arm art baby bag ball bank basket beach bed bell bird book bottle box boy branch bread bridge brother bucket "
            "butter button cake camp candle castle chair cheese child circle city clock cloud coffee coin corn corner cup "
            "dance desk dinner door dream dust ear earth egg engine evening eye face family farm father feather field fire "
            "fish flag floor flower food foot forest fork friend game garden gate gift girl glass gold grass hair hand head "
            "heart hill home honey hope house ice ink iron island jar jewel judge juice jungle key king kitchen kite knee "
            "knife lake lamp leaf leg letter library light line map market meal milk mirror money moon morning mother "
            "mountain music nail name neck needle nest net night noise north nose number ocean office oil oven page paint "
            "paper park party pen pencil people picture pillow pizza planet plant plate pocket poem pond prince queen quiet "
            "rain river road rock roof room rope rose salad salt sand school sea seed shadow shelf shop silver sister sky "
            "smoke snow soap song soup spoon spring star stone storm story street sugar summer sun table tea teacher tent "
            "theater thread ticket time tooth tower town toy tree uncle valley village voice wall watch water wave wheel wind "
            "window winter wood wool word world yard year zoo".split()
        )
    )
)
NAMES = (
    "Tom Anna Ben Clara David Emma Frank Grace Henry Iris Jack Kate Leo Mia Nora Oscar Paul Rosa Sam Tina Victor Wendy Alice "
    "Bob Carol Dan Eva Fred Gina Hugo Ivan Julia Kevin Laura Mark Nina Olga Peter Ruth Steve"
).split()
SURNAMES = "Smith Brown Jones Miller Davis Wilson Taylor Clark Lewis Hill Green Baker Adams Young King".split()
JOBS = "teacher doctor nurse farmer baker pilot driver painter singer writer lawyer judge cook engineer".split()
FACTS = {  # statement -> truth; the question form is made by moving the verb forward
    True: "ice is cold;fire is hot;the sun is hot;snow is white;grass is green;water is wet;sugar is sweet;the sky is blue;"
    "a mouse is small;an elephant is big;birds can fly;fish can swim;dogs can run;a week has seven days;"
    "a year has twelve months;a car has wheels;a dog has four legs;a bird has two wings;a triangle has three sides;"
    "a square has four sides;the earth is round;the moon is smaller than the earth;milk is white;coal is black;"
    "summer is warmer than winter;a day has 24 hours;an hour has 60 minutes;lemons are sour;rocks are hard;honey is sweet",
    False: "ice is hot;fire is cold;the sun is cold;snow is black;grass is red;water is dry;sugar is salty;the sky is green;"
    "a mouse is bigger than an elephant;an elephant is small;fish can fly;stones can swim;cows can fly;a week has ten days;"
    "a year has five months;a chair has wings;a dog has six legs;a bird has four wings;a triangle has four sides;"
    "a square has three sides;the earth is flat;the moon is bigger than the earth;milk is black;coal is white;"
    "winter is warmer than summer;a day has 30 hours;an hour has 10 minutes;lemons are sweet;rocks are soft;honey is sour",
}

# ---------------------------------------------------------------- phrasing

OPENERS = (
    "Hi! ;Hello! ;Hey! ;Quick question: ;I have a question. ;Please help me. ;Can you help me? ;OK. ;Next question: ;So, ;"
    "Tell me: ;Please answer: ;Question: ;Thanks. ;Good morning. ;One more: ;Hello, I need help. ;"
).split(";")
CLOSERS = " Thanks!; Thank you.; Please.; Please answer briefly.; Just the answer.; Give only the answer.; Thanks".split(";")


def is_held_out(key: str) -> bool:
    """Whether a key is held out of training: a closed set's key by its phrasing, any other by its hash."""
    if key.startswith("phrasing|"):
        return key.removeprefix("phrasing|") in HELD_OUT_PHRASINGS
    if key.endswith(" small"):  # 3 + 4 must give 7: the smallest questions are all in training, and never scored
        return False
    return hashlib.blake2b(key.encode(), digest_size=4).digest()[0] % HELD_OUT_ONE_IN == 0


def phrase(rng, core, **slots):
    """`core` with its slots filled, varied as people type: with greeting, thanks, in lower case, without full stop."""
    text = core.lower() if rng.random() < 0.15 else core
    opener = rng.choice(OPENERS) if rng.random() < 0.2 else ""
    closer = rng.choice(CLOSERS) if rng.random() < 0.12 else ""
    if not closer and text[-1] in "?." and rng.random() < 0.2:
        text = text[:-1]
    elif text[-1] not in "?.!" and (closer or rng.random() < 0.1):
        text += "."
    return opener + text.format(**slots) + closer


def lines(block):
    return tuple(line.strip() for line in block.strip().splitlines())


ADD = lines("""
    {a} + {b}\n{a}+{b}\n{a} + {b} =\n{a}+{b}=\n{a} + {b} = ?\nWhat is {a} + {b}?\nWhat is {a}+{b}?\nWhat is {a} plus {b}?
    What's {a} + {b}?\nWhat's {a} plus {b}?\n{a} plus {b}\nAdd {a} and {b}.\nAdd {a} to {b}.\nAdd {b} to {a}
    Calculate {a} + {b}.
    Calculate {a} plus {b}\nCompute {a} + {b}.\nCompute {a}+{b}\nHow much is {a} + {b}?\nHow much is {a} plus {b}?
    Find the sum of {a} and {b}.\nWhat is the sum of {a} and {b}?\nThe sum of {a} and {b}\nSum {a} and {b}.
    What do you get if you add {a} and {b}?\nWhat does {a} plus {b} equal?\nCan you add {a} and {b}?\nPlease add {a} and {b}.
    Can you tell me what {a} + {b} is?\nPlease calculate {a} + {b}.\nWhat does {a} + {b} make?\nCould you add {a} and {b}?
    Solve {a} + {b}.\nWhat is the total of {a} and {b}?\n{n} has {a} {w}s and gets {b} more. How many {w}s does {n} have?
    There are {a} {w}s and {b} {v}s. How many things are there in total?\n{n} has {a} coins and finds {b} more. How many now?
""")
SUBTRACT = lines("""
    {a} - {b}\n{a}-{b}\n{a} - {b} =\n{a}-{b}=\n{a} - {b} = ?\nWhat is {a} - {b}?\nWhat is {a}-{b}?\nWhat is {a} minus {b}?
    What's {a} - {b}?\nWhat's {a} minus {b}?\n{a} minus {b}\nSubtract {b} from {a}.\nPlease subtract {b} from {a}.
    Calculate {a} - {b}.\nCalculate {a} minus {b}\nCompute {a} - {b}.\nCompute {a}-{b}\nHow much is {a} - {b}?
    How much is {a} minus {b}?\nTake {b} away from {a}.\nTake {b} from {a}.\nWhat is left if you take {b} from {a}?
    What do you get if you subtract {b} from {a}?\nWhat does {a} minus {b} equal?\nCan you subtract {b} from {a}?
    Can you tell me what {a} - {b} is?\nPlease calculate {a} - {b}.\nSolve {a} - {b}.\nWhat does {a} - {b} make?
""")
SUBTRACT_STORY = lines("""
    {n} has {a} {w}s and gives away {b}. How many {w}s are left?\nThere are {a} {w}s and {b} are lost. How many are left?
    What is the difference between {a} and {b}?\n{n} had {a} coins and spent {b}. How many coins are left?
""")
COUNT_UP = lines("""
    Count from {a} to {b}.\nCount up from {a} to {b}.\nPlease count from {a} to {b}.\nCan you count from {a} to {b}?
    List the numbers from {a} to {b}.\nWrite the numbers from {a} to {b}.\nCount {a} to {b}\nNumbers from {a} to {b}
    Give me the numbers from {a} to {b}.\nCount upwards from {a} to {b}.\nStart at {a} and count to {b}.
""")
COUNT_DOWN = lines("""
    Count down from {a} to {b}.\nPlease count down from {a} to {b}.\nCount backwards from {a} to {b}.
    Count from {a} down to {b}.
    Can you count down from {a} to {b}?\nList the numbers from {a} down to {b}.\nCount back from {a} to {b}.
""")
COUNT_STEP = lines("""
    Count from {a} to {b} by {s}s.\nCount by {s} from {a} to {b}.\nCount from {a} to {b} in steps of {s}.
    Count in steps of {s} from {a} to {b}.\nList the numbers from {a} to {b} in steps of {s}.
""")
COUNT_WORDS = lines("""
    How many words are in this list: {x}\nHow many words are there: {x}\nCount the words: {x}\nCount these words: {x}
    How many words are in "{x}"?\nHow many words do you see: {x}\nWhat is the number of words in: {x}\nCount the words in "{x}".
""")
LETTERS = lines("""
    How many letters are in the word {w}?\nHow many letters does {w} have?\nHow many letters are in "{w}"?
    How many letters does the word {w} have?\nCount the letters in {w}.\nCount the letters in the word {w}.
    How many letters are there in {w}?\nHow long is the word {w}?\nThe word {w} has how many letters?\nNumber of letters in {w}
    What is the number of letters in {w}?\nHow many letters are there in the word "{w}"?\nHow many letters in {w}?
    Tell me how many letters {w} has.\nCan you count the letters in {w}?\nPlease count the letters in the word {w}.
""")
SORT = lines("""
    Sort these words: {x}\nSort these words alphabetically: {x}\nSort the words {x}\nSort alphabetically: {x}\nSort: {x}
    Put these words in alphabetical order: {x}\nPlease sort these words: {x}\nCan you sort these words? {x}
    Arrange these words alphabetically: {x}\nOrder these words from A to Z: {x}\nAlphabetical order: {x}\nSort {x}
    Sort the following words alphabetically: {x}\nWrite these words in alphabetical order: {x}\nSort from A to Z: {x}
    Sort {x} alphabetically.\nPut {x} in alphabetical order.\nPlease put in alphabetical order: {x}\nAlphabetize: {x}
""")
REVERSE = lines("""
    Reverse the order of these words: {x}\nReverse these words: {x}\nReverse the words: {x}\nReverse: {x}\nReverse {x}
    Say these words backwards: {x}\nWrite these words in reverse order: {x}\nPlease reverse this list: {x}
    Can you reverse the order of these words? {x}\nPut these words in reverse order: {x}\nReverse the word order: {x}
    Repeat these words in reverse order: {x}\nReverse this list of words: {x}\nTurn this list around: {x}
    List these words from last to first: {x}\nReverse the order of {x}.\nReverse the following words: {x}
""")
CALENDAR = {  # {d}: a name, {n}: a distance, {u}: "day" for weekdays, "month" for months
    1: lines("""
        What {u} comes after {d}?\nWhich {u} comes after {d}?\nWhat is the {u} after {d}?\nWhich {u} follows {d}?
        Next {u} after {d}?
        What comes after {d}?\nWhat {u} follows {d}?\nWhat {u} is it after {d}?\nAfter {d} comes which {u}?\nThe {u} after {d}
        What is the next {u} after {d}?\nWhich {u} is after {d}?\nName the {u} after {d}.\nTell me the {u} after {d}.
        What {u} is after {d}?\nWhich {u} comes right after {d}?\nCan you tell me what {u} comes after {d}?
    """),
    -1: lines("""
        What {u} comes before {d}?\nWhich {u} comes before {d}?\nWhat is the {u} before {d}?\nWhich {u} is before {d}?
        What comes before {d}?\nWhat {u} is it before {d}?\nBefore {d} comes which {u}?\nThe {u} before {d}
        Name the {u} before {d}.
        What {u} is before {d}?\nWhich {u} comes right before {d}?\nCan you tell me what {u} comes before {d}?
        Tell me the {u} before {d}.\nWhat was the {u} before {d}?\nWhich {u} precedes {d}?\nWhat {u} precedes {d}?
    """),
    "after": lines("""
        What {u} is {n} {u}s after {d}?\nWhich {u} is {n} {u}s after {d}?\n{n} {u}s after {d}
        What {u} comes {n} {u}s after {d}?
        Which {u} comes {n} {u}s after {d}?\nWhat is {n} {u}s after {d}?\nIf it is {d}, what {u} is it in {n} {u}s?
        It is {d}. What {u} is it in {n} {u}s?\nIt is {d}. Which {u} will it be in {n} {u}s?\nName the {u} {n} {u}s after {d}.
        If it is {d} now, which {u} is it {n} {u}s later?\nWhat {u} will it be {n} {u}s after {d}?\n{d} plus {n} {u}s
        Which {u} is it {n} {u}s after {d}?\nTell me the {u} {n} {u}s after {d}.\nWhat is the {u} {n} {u}s after {d}?
    """),
    "before": lines("""
        What {u} is {n} {u}s before {d}?\nWhich {u} is {n} {u}s before {d}?\n{n} {u}s before {d}
        What {u} comes {n} {u}s before {d}?
        Which {u} comes {n} {u}s before {d}?\nWhat is {n} {u}s before {d}?\nIt is {d}. What {u} was it {n} {u}s ago?
        If it is {d}, what {u} was it {n} {u}s ago?\nIt is {d}. Which {u} was it {n} {u}s ago?
        Name the {u} {n} {u}s before {d}.
        What {u} was it {n} {u}s before {d}?\nWhich {u} was it {n} {u}s before {d}?\nTell me the {u} {n} {u}s before {d}.
        {d} minus {n} {u}s\nWhat was the {u} {n} {u}s before {d}?\nWhat is the {u} {n} {u}s before {d}?
    """),
    "tomorrow": lines("""
        If today is {d}, what day is tomorrow?\nToday is {d}. What day is tomorrow?\nToday is {d}. What is tomorrow?
        It is {d} today. What day is it tomorrow?\nIf today is {d}, what is tomorrow?
        If it is {d} today, which day is tomorrow?
        Today is {d}, so tomorrow is?\nWhat day is tomorrow if today is {d}?\nWhich day is tomorrow if it is {d} today?
    """),
    "yesterday": lines("""
        If today is {d}, what day was yesterday?\nToday is {d}. What day was yesterday?\nToday is {d}. What was yesterday?
        It is {d} today. What day was it yesterday?\nIf today is {d}, what was yesterday?
        If it is {d} today, which day was yesterday?
        Today is {d}, so yesterday was?\nWhat day was yesterday if today is {d}?\nWhich day was yesterday if it is {d} today?
    """),
    "number": lines("""
        Which number is {d}?\nWhat number is {d}?\nWhich number is the month {d}?\nWhat number is the month of {d}?
        {d} is month number?
        What is the number of the month {d}?\nWhat month number is {d}?\nThe number of {d}\nTell me the number of the month {d}.
        Which month of the year is {d}, as a number?\nGive the number of the month {d}.\nWhich month number is {d}?
        What is the month number of {d}?\nWhich number does the month {d} have?\nWhat number does {d} have in the year?
    """),
    "nth": lines("""
        What is month number {n}?\nWhich month is number {n}?\nWhat month is number {n}?\nMonth number {n}
        Name month number {n}.
        What is the name of month {n}?\nWhich month is month {n}?\nWhich month has number {n}?
        Tell me the month with number {n}.
        What is the name of month number {n}?\nWhat month has the number {n}?\nWhat is the month with number {n}?
    """),
    "length": lines("""
        How many days does {d} have?\nHow many days are in {d}?\nHow many days are there in {d}?\n{d} has how many days?
        How long is {d} in days?\nNumber of days in {d}\nWhat is the number of days in {d}?\nTell me how many days {d} has.
        How many days has {d}?\nHow many days in {d}?\nHow many days are in the month of {d}?
        How many days does the month {d} have?
    """),
}
CAPITAL_OF = lines("""
    What is the capital of {c}?\nWhat's the capital of {c}?\nCapital of {c}?\nThe capital of {c}
    Which city is the capital of {c}?
    Name the capital of {c}.\nTell me the capital of {c}.\nWhat is the capital city of {c}?
    Which city is the capital city of {c}?
    What city is the capital of {c}?\nDo you know the capital of {c}?\nCan you tell me the capital of {c}?\n{c}: capital?
    Can you name the capital of {c}?\nI want to know the capital of {c}.\nCould you tell me the capital city of {c}?
    Give me the capital of {c}.\nPlease name the capital city of {c}.\nThe capital of {c} is which city?\n{c} has which capital?
    Do you know what the capital of {c} is?\nPlease tell me what the capital of {c} is.\nWhat is {c}'s capital?
    What is the name of the capital of {c}?\nI forgot the capital of {c}. What is it?\nWhat city is {c}'s capital?
    What capital does {c} have?\nCould you name the capital city of {c}?\nWhich capital does {c} have?
    The capital city of {c} is
""")
COUNTRY_OF = lines("""
    Which country has the capital {c}?\n{c} is the capital of which country?\nWhat country is {c} the capital of?
    {c} is the capital of what country?\nOf which country is {c} the capital?\nWhich country is {c} the capital of?
    Which country has {c} as its capital?\nWhat country has the capital {c}?\nWhat country has {c} as its capital?
    Name the country whose capital is {c}.\nTell me the country whose capital is {c}.\nThe capital {c} belongs to which country?
    {c} is the capital city of which country?\nWhich country's capital is {c}?\nWhich country has the capital city {c}?
""")
YES_NO = lines("""
    {q}?\n{q}\nYes or no: {q}?\nAnswer yes or no: {q}?\nAnswer with yes or no. {q}?\nTell me, {q}?\nIs it true that {s}?
    {s}, right?
    Is it correct that {s}?\nWould you say that {s}?\nDo you think that {s}?\nTrue or not: {s}?\nIs this right: {s}?
    {s}. Yes or no?
    Is this true? {s}.\nIs this correct? {s}.\n{q}, yes or no?\nDo you agree that {s}?\n{s}. Is that true?\n{s}. Is that right?
    Can you say if {s}?\nPlease tell me: {q}?\nIs it right that {s}?\nIs this statement true? {s}.\n{s}. Is this correct?
    Do you know: {q}?\nIs the following true? {s}.\nYes or no, {q}?\nThey say {s}. Is it true?\n{s}, yes or no?
    Please answer yes or no: {q}?\nI think {s}. Am I right?\n{s}. True?\nIs it true? {s}.\nSay yes or no: {q}?
""")
MORE, LESS = "larger bigger greater higher more".split(), "smaller less lower".split()
JSON_ASK = lines("""
    Give me a JSON object with {x}.\nMake a JSON object with {x}.\nCreate a JSON object with {x}.\nWrite a JSON object with {x}.
    JSON object with {x}\nReturn a JSON object with {x}\nGenerate JSON with {x}.\nGive me JSON with {x}
    Fill a JSON object with {x}.
    Please give me a JSON object with {x}.\nConvert to JSON: {x}\nAs JSON: {x}\nWrite this as JSON: {x}
    Turn this into JSON: {x}
    Can you make a JSON object with {x}?\nFill in a JSON object: {x}\nI need a JSON object with {x}.\nOutput JSON: {x}
""")
# Several values in one slot, {p} the words before it ("in the "), and two questions: {l} and {r}, or {f} in lower case
TWO_VALUES = lines("""
    {x} and {y}\n{x} and {y}\n{x} and {y}\n{x} and {p}{y}\n{x} and {p}{y}\n{x} and also {p}{y}\n{x} and {p}{y} too
    both {x} and {y}\n{x} as well as {y}\n{x} as well as {p}{y}\n{x} & {y}\n{x}, and {p}{y}\n{x} and also {y}
""")
THREE_VALUES = ("{x}, {y} and {z}", "{x}, {y}, and {z}", "{x}, {y} and {p}{z}", "{x} and {y} and {z}", "{x}, {p}{y} and {p}{z}")
AND_ALSO = lines("""
    And {p}{y}?\nAnd {y}?\nWhat about {y}?\nAnd what about {y}?\nHow about {y}?\nAlso {p}{y}.\nAnd also {p}{y}.
    The same for {y}.\nDo the same for {y}.\nAnd the same for {y}, please.\nAnd for {y}?\nThen {p}{y}.
""")
TWO_SENTENCES = lines("""
    {l} {r}\n{l} {r}\n{l} And {f}\n{l} Also, {f}\n{l} Also {f}\n{l} Then {f}\n{l} After that, {f}\n{l} And then {f}
    I have two questions. {l} {r}\nTwo things: {l} {r}\n{l} One more: {f}
""")
WITH_AND_WITH = lines("""
    Call {f} with {x} and with {y}.\nCall {f} twice, with {x} and with {y}.\nUse {f} with {x}, then with {y}.
    Run {f} with {x}. Run it again with {y}.\nPlease call {f} with {x} and call it with {y}.\nUse {f} with {x} and {f} with {y}
""")

HELD_OUT_PHRASINGS = {core for table in (*CALENDAR.values(), CAPITAL_OF, COUNTRY_OF, YES_NO, LETTERS) for core in table[4::6]}
