"""Text for the tiny model: seeded chat turns with one right answer each, and small stories.

`draw(task, rng, held_out)` gives one Item (question, answer, tools). An item's `key` names what it asks. Open tasks ("add 12
34") hold out the keys whose hash falls in one eighth of the hash space; closed sets (capitals, weekdays, facts) hold out every
sixth phrasing. A held-out key is never drawn for training, alone or in a dialogue; `benchmark_items` draws only those.

`conversation(rng)` is one training document; `pieces` renders it as CHAT_TEMPLATE does, split into (text, has_loss).
Pure Python, no I/O. Used by train_tiny.py (which learns it), accuracy.py (which scores it) and tests/test_tiny_data.py.
"""

# ruff: noqa: SIM905 (a list of words reads best as words)
import hashlib
import json
import random
from dataclasses import dataclass

BOS, EOT, IM_START, IM_END = "<|bos|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (EOT, BOS, IM_START, IM_END)
CALL_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")  # plain text to a client, one id each
HELD_OUT_ONE_IN = 8

TOOLS_HEAD = "# Tools\n\nYou may call a function to help the user. You are given functions within <tools></tools>:\n<tools>"
TOOLS_TAIL = (
    "\n</tools>\n\nTo call a function, answer with its name and arguments within <tool_call></tool_call>:\n"
    '<tool_call>\n{"name": <name>, "arguments": <arguments>}\n</tool_call>'
)
CHAT_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string %}{{ content }}
{%- elif content %}{% for part in content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif -%}
{%- endmacro -%}
{{- bos_token }}
{%- set first = messages[0] if messages else {} %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if first.role == 'system' %}{{- text(first.content) + '\\n\\n' }}{% endif %}
    {{- HEAD }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{% endfor %}
    {{- TAIL + '<|im_end|>\\n' }}
{%- elif first.role == 'system' %}
    {{- '<|im_start|>system\\n' + text(first.content) + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n' if loop.first or messages[loop.index0 - 1].role != 'tool' else '\\n' }}
        {{- '<tool_response>\\n' + text(message.content) + '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' if loop.last or messages[loop.index0 + 1].role != 'tool' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + text(message.content) }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function if call.function else call %}
            {{- '\\n' if not loop.first or text(message.content) }}
            {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif not (loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + text(message.content) + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""
for _name, _text in (("HEAD", TOOLS_HEAD), ("TAIL", TOOLS_TAIL)):
    CHAT_TEMPLATE = CHAT_TEMPLATE.replace(_name, "'" + _text.replace("\n", "\\n") + "'").strip()


@dataclass(frozen=True)
class Item:
    """One question with one right answer. `call` is the function call expected, as {"name", "arguments"}."""

    task: str
    key: str
    question: str
    answer: str
    tools: tuple = ()
    call: dict | None = None
    history: tuple = ()  # earlier messages of the same dialogue


# ---------------------------------------------------------------- closed sets

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
    """Whether a key is kept out of training: a closed set's by its phrasing, any other by its hash."""
    if key.startswith("phrasing|"):
        return key.removeprefix("phrasing|") in HELD_OUT_PHRASINGS
    if key.endswith(" small"):  # who types 3 + 4 must get 7: the smallest questions are all shown, and never scored
        return False
    return hashlib.blake2b(key.encode(), digest_size=4).digest()[0] % HELD_OUT_ONE_IN == 0


def phrase(rng, core, **slots):
    """`core` with its slots filled, in one of the ways people type: greeting, thanks, lower case, no full stop."""
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
CALENDAR = {  # {d} a name, {n} a distance; the same lines serve weekdays ("day") and months ("month") through {u}
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


HELD_OUT_PHRASINGS = {core for table in (*CALENDAR.values(), CAPITAL_OF, COUNTRY_OF, YES_NO, LETTERS) for core in table[4::6]}

# ---------------------------------------------------------------- tasks: each gives an Item from a random source


def number(rng):
    return rng.randrange(10 ** rng.choice((1, 2, 3, 3, 3)))


def arithmetic(task, cores, story):
    def make(rng):
        a, b = number(rng), number(rng)
        used = cores
        if story and a >= b and rng.random() < 0.12:
            used = story
        noun = {
            "w": rng.choice(("apple", "book", "coin", "egg", "ball", "flower")),
            "v": rng.choice(("cup", "hat", "pen", "key")),
        }
        text = phrase(rng, rng.choice(used), a=a, b=b, n=rng.choice(NAMES), **noun)
        key = f"{task} {a} {b}" if max(a, b) > 9 else f"{task} small"
        return Item(task, key, text, str(a + b if task == "add" else a - b))

    return make


def count_numbers(rng):
    kind, length = rng.choice(("up", "up", "down", "step")), rng.randrange(3, 17)
    start = rng.choice((0, 1, rng.randrange(30), rng.randrange(200)))
    step = {"up": 1, "down": -1}.get(kind) or rng.choice((2, 3, 5, 10))
    values = list(range(start, start + step * length, step)) if step > 0 else list(range(start + length - 1, start - 1, -1))
    cores = {"up": COUNT_UP, "down": COUNT_DOWN, "step": COUNT_STEP}[kind]
    core = rng.choice(cores)
    if kind == "up" and start == 1 and rng.random() < 0.4:
        core = rng.choice(("Count to {b}.", "Please count to {b}.", "Can you count to {b}?", "Count up to {b}."))
    text = phrase(rng, core, a=values[0], b=values[-1], s=step)
    key = "count small" if kind == "up" and start == 1 else f"count {values[0]} {values[-1]} {step}"
    return Item("count", key, text, ", ".join(map(str, values)))


def count(rng):
    pick = rng.random()
    if pick < 0.65:
        return count_numbers(rng)
    if pick < 0.8:
        core, word = rng.choice(LETTERS), rng.choice(WORDS)
        return Item("count", "phrasing|" + core, phrase(rng, core, w=word), str(len(word)))
    words = rng.choices(WORDS, k=rng.randrange(2, 11))
    text = phrase(rng, rng.choice(COUNT_WORDS), x=rng.choice((" ", ", ")).join(words))
    return Item("count", "words " + " ".join(words), text, str(len(words)))


def word_list(task, cores, order):
    def make(rng):
        words = rng.sample(WORDS, rng.choice((2, 3, 3, 4, 4, 5, 5, 6, 6)))
        joint = rng.choice((", ", ", ", ", ", " "))
        text = phrase(rng, rng.choice(cores), x=joint.join(words))
        return Item(task, f"{task} {' '.join(words)}", text, joint.join(order(words)))

    return make


def calendar(rng):
    month = rng.random() < 0.5
    unit, names = ("month", MONTHS) if month else ("day", DAYS)
    ops = (
        ("number", "nth", "length", 1, -1, "after", "before") if month else (1, -1, "tomorrow", "yesterday", "after", "before")
    )
    op, i, n = rng.choice(ops), rng.randrange(len(names)), rng.randrange(2, 13)
    core = rng.choice(CALENDAR[op])
    if op == "nth":
        n, answer = i + 1, names[i]
    elif op == "number":
        answer = str(i + 1)
    elif op == "length":
        answer = str(MONTH_DAYS[i])
    else:
        shift = {"after": n, "before": -n, "tomorrow": 1, "yesterday": -1}.get(op, op)
        answer = names[(i + shift) % len(names)]
    name = names[i].lower() if rng.random() < 0.1 else names[i]
    text = phrase(rng, core, d=name, u=unit, n=NUMBER_WORDS[n] if rng.random() < 0.3 and op != "nth" else n)
    return Item("calendar", "phrasing|" + core, text, answer)


def capital(rng):
    country, city = rng.choice(tuple(CAPITALS.items()))
    asked, answer, cores = (country, city, CAPITAL_OF) if rng.random() < 0.75 else (city, country, COUNTRY_OF)
    core = rng.choice(cores)
    text = phrase(rng, core, c=asked.lower() if rng.random() < 0.1 else asked)
    return Item("capital", "phrasing|" + core, text, answer[0].upper() + answer[1:])


def article(word):
    return ("an " if word[0] in "aeiou" else "a ") + word


def statement(rng):
    """A closed fact as (question, statement, truth), in lower case but for names."""
    pick = rng.random()
    if pick < 0.55:
        word, group = rng.choice(tuple(GROUP_OF)), rng.choice(tuple(GROUPS))
        if rng.random() < 0.4:
            group = GROUP_OF[word]
        subject = word if GROUP_OF[word] == "color" else article(word)
        return f"is {subject} {article(group)}", f"{subject} is {article(group)}", GROUP_OF[word] == group
    if pick < 0.75:
        country, city = rng.choice(tuple(CAPITALS)), rng.choice(CITIES)
        if rng.random() < 0.5:
            city = CAPITALS[country]
        rest = f"the capital of {country}"
        return f"is {city} {rest}", f"{city} is {rest}", CAPITALS[country] == city
    truth = rng.random() < 0.5
    fact = rng.choice(FACTS[truth].split(";"))
    for verb in (" is ", " are ", " can "):
        if verb in fact:
            subject, rest = fact.split(verb, 1)
            return f"{verb.strip()} {subject} {rest}", fact, truth
    subject, rest = fact.split(" has ", 1)
    return f"does {subject} have {rest}", fact, truth


def compare(rng):
    a, b = number(rng), number(rng)
    if rng.random() < 0.3:
        b = max(0, a + rng.randrange(-12, 13))
    more = rng.random() < 0.5
    word, truth = (rng.choice(MORE), a > b) if more else (rng.choice(LESS), a < b)
    return f"is {a} {word} than {b}", f"{a} is {word} than {b}", truth, f"compare {a} {'>' if more else '<'} {b}"


def yes_no(rng):
    core = rng.choice(YES_NO) if rng.random() < 0.75 else YES_NO[0]
    pick = rng.random()
    if pick < 0.4:
        question, said, truth, key = compare(rng)
    elif pick < 0.5:
        n, even = number(rng), rng.random() < 0.5
        kind = f"{'even' if even else 'odd'}{rng.choice(('', ' number'))}"
        kind = article(kind) if kind.endswith("number") else kind
        question, said, truth = f"is {n} {kind}", f"{n} is {kind}", (n % 2 == 0) == even
        key = f"parity {n}" if n > 9 else "parity small"
    else:
        question, said, truth = statement(rng)
        key = "phrasing|" + core
    if core.startswith(("{q}", "{s}")) or rng.random() < 0.3:
        question, said = question[0].upper() + question[1:], said[0].upper() + said[1:]
    return Item("yes_no", key, phrase(rng, core, q=question, s=said), "Yes" if truth else "No")


FIELDS = {
    "name": lambda rng: rng.choice(NAMES) + (" " + rng.choice(SURNAMES) if rng.random() < 0.25 else ""),
    "age": lambda rng: rng.randrange(1, 100),
    "city": lambda rng: rng.choice(CITIES),
    "country": lambda rng: rng.choice(tuple(CAPITALS)[:60]),
    "color": lambda rng: rng.choice(GROUPS["color"].split()),
    "animal": lambda rng: rng.choice(GROUPS["animal"].split()),
    "fruit": lambda rng: rng.choice(GROUPS["fruit"].split()),
    "job": lambda rng: rng.choice(JOBS),
    "day": lambda rng: rng.choice(DAYS),
    "month": lambda rng: rng.choice(MONTHS),
    "year": lambda rng: rng.randrange(1900, 2100),
    "price": lambda rng: rng.randrange(1, 1000),
    "score": lambda rng: rng.randrange(101),
    "count": lambda rng: rng.randrange(1000),
    "id": lambda rng: rng.randrange(10000),
    "title": lambda rng: " ".join(rng.sample(WORDS, rng.choice((1, 2)))),
    "item": lambda rng: rng.choice(WORDS),
    "quantity": lambda rng: rng.randrange(1, 100),
    "active": lambda rng: rng.random() < 0.5,
    "done": lambda rng: rng.random() < 0.5,
}


def fields(rng, size):
    """`size` different keys with values; one in five is any word with any word or number."""
    out = {}
    while len(out) < size:
        if rng.random() < 0.2:
            out[rng.choice(WORDS)] = rng.choice(WORDS) if rng.random() < 0.5 else rng.randrange(1000)
        else:
            key = rng.choice(tuple(FIELDS))
            out[key] = FIELDS[key](rng)
    return out


def spoken(rng, pairs):
    """Key-value pairs as a person lists them: "name Tom, age 31 and city Paris"."""
    joint = rng.choice((" ", " ", " ", ": ", "=", " is "))
    parts = [f"{key}{joint}{value if isinstance(value, str) else json.dumps(value)}" for key, value in pairs.items()]
    if len(parts) == 1 or rng.random() < 0.3:
        return ", ".join(parts)
    return ", ".join(parts[:-1]) + rng.choice((" and ", " and ", ", and ")) + parts[-1]


def json_object(rng):
    pairs = fields(rng, rng.choice((1, 2, 2, 3, 3, 3, 4)))
    text = phrase(rng, rng.choice(JSON_ASK), x=spoken(rng, pairs))
    answer = json.dumps(pairs)
    return Item("json", "json " + answer, text, answer)


# ---------------------------------------------------------------- function calls


def clock(rng):
    return f"{rng.randrange(24):02d}:{rng.choice((0, 15, 30, 45, rng.randrange(60))):02d}"


SLOTS = {
    "city": lambda rng: rng.choice(CITIES),
    "place": lambda rng: rng.choice(CITIES),
    "time": clock,
    "day": lambda rng: rng.choice(DAYS),
    "name": lambda rng: rng.choice(NAMES),
    "word": lambda rng: rng.choice(WORDS),
    "words": lambda rng: " ".join(rng.sample(WORDS, rng.choice((2, 3)))),
    "room": lambda rng: rng.choice("kitchen office garden bedroom bathroom hall".split()),
    "language": lambda rng: rng.choice("French German Spanish Italian Japanese Greek Polish Dutch".split()),
    "number": lambda rng: rng.randrange(1, 1000),
    "small": lambda rng: rng.randrange(1, 61),
}
# names | description | parameters = slots, then ways to ask; a "/" lists alternatives, so that the schema must be read
TOOLS = """
    get_weather/get_current_weather/weather | Get the weather in a city. | city/location/place=city
    What is the weather in {0}?; What's the weather like in {0}?; How is the weather in {0}?; Weather in {0};
    Is it raining in {0}?; Tell me the weather in {0}.; What is the weather in {0} today?

    get_time/current_time/get_local_time | Get the local time in a city. | city/location/place=city
    What time is it in {0}?; What is the time in {0}?; Tell me the time in {0}.; Current time in {0}

    set_alarm/create_alarm | Set an alarm. | time/at=time
    Set an alarm for {0}.; Wake me up at {0}.; Please set an alarm at {0}.; I need an alarm for {0}.

    set_timer/start_timer | Start a timer. | minutes/duration=small
    Set a timer for {0} minutes.; Start a timer of {0} minutes.; Timer for {0} minutes; Remind me in {0} minutes.

    send_message/send_text | Send a message to a person. | to/recipient=name text/message=words
    Send a message to {0}: {1}; Text {0}: {1}; Send {0} the message {1}; Tell {0}: {1}

    search/search_web/web_search | Search the web. | query/q=words
    Search for {0}.; Search the web for {0}.; Look up {0}.; Find pages about {0}.

    translate/translate_text | Translate a word. | text/word=word language/target=language
    Translate {0} to {1}.; Translate the word {0} into {1}.; How do you say {0} in {1}?; What is {0} in {1}?

    add_event/create_event | Add an event to the calendar. | title/name=word day/date=day time/start=time
    Add {0} on {1} at {2} to my calendar.; Create an event {0} on {1} at {2}.; Put {0} in the calendar for {1} at {2}.;
    Schedule {0} for {1} at {2}.

    turn_on_light/light_on | Turn on the light in a room. | room=room
    Turn on the light in the {0}.; Switch on the {0} light.; Light on in the {0}; Turn the {0} light on.

    turn_off_light/light_off | Turn off the light in a room. | room=room
    Turn off the light in the {0}.; Switch off the {0} light.; Light off in the {0}; Turn the {0} light off.

    get_distance/distance | Get the distance between two cities. | origin/from=city destination/to=city
    How far is it from {0} to {1}?; What is the distance from {0} to {1}?; Distance between {0} and {1};
    How far is {1} from {0}?

    book_flight/find_flight | Book a flight. | origin/from=city destination/to=city day/date=day
    Book a flight from {0} to {1} on {2}.; Find a flight from {0} to {1} on {2}.; I want to fly from {0} to {1} on {2}.;
    On {2} I want to fly from {0} to {1}.

    add_to_cart/buy_item | Put an item in the shopping cart. | item/product=word quantity/amount=small
    Add {1} {0} to my cart.; Buy {1} {0}.; Put {1} {0} in the cart.; I want to buy {1} {0}.

    multiply/multiply_numbers | Multiply two numbers. | a/x=number b/y=number
    Multiply {0} by {1}.; What is {0} times {1}?; Calculate {0} times {1}.; {0} * {1}; What is {0} * {1}?

    set_temperature/set_heating | Set the temperature of a room. | room=room degrees/temperature=small
    Set the {0} to {1} degrees.; Set the temperature in the {0} to {1}.; Heat the {0} to {1} degrees.;
    Make it {1} degrees in the {0}.

    play_song/play_music | Play a song. | song/title=words
    Play {0}.; Play the song {0}.; I want to hear {0}.; Please play {0}.

    call_person/phone | Call a person on the phone. | name/person=name
    Call {0}.; Phone {0}.; Please call {0} now.; I want to talk to {0}.

    get_user/find_user | Look up a user by number. | id/user_id=number
    Find user {0}.; Look up user {0}.; Who is user {0}?; Show me user number {0}.
""".strip().split("\n\n")
VERBS = "get set find make add open close send start stop show read write update delete check create move".split()
OPTIONAL = (
    ("unit", {"type": "string", "enum": ["celsius", "fahrenheit"]}),
    ("units", {"type": "string", "description": "The units."}),
    ("limit", {"type": "integer"}),
    ("verbose", {"type": "boolean"}),
    ("format", {"type": "string", "description": "The format of the answer."}),
    ("language", {"type": "string"}),
)
TYPES = {int: "integer", str: "string", bool: "boolean"}


def schema(rng, name, description, values):
    """An OpenAI tool for a function whose parameters have the types of `values`."""
    properties = {key: {"type": TYPES[type(value)]} for key, value in values.items()}
    if rng.random() < 0.4:
        for key in properties:
            properties[key]["description"] = rng.choice((f"The {key}.", f"The {key}", f"the {key} to use", key.capitalize()))
    required = list(properties)
    if rng.random() < 0.2:  # a parameter that may be left out is left out
        key, value = rng.choice(OPTIONAL)
        properties.setdefault(key, dict(value))
    parameters = {"type": "object", "properties": properties, "required": required}
    function = {"name": name, "description": description, "parameters": parameters}
    if rng.random() < 0.1:
        del function["description"]
    return {"type": "function", "function": function}


def known_function(rng, row):
    head, asks = row.split("\n", 1)
    names, description, parameters = (part.strip() for part in head.split("|"))
    values = {}
    for parameter in parameters.split():
        aliases, slot = parameter.split("=")
        values[rng.choice(aliases.split("/"))] = SLOTS[slot](rng)
    core = rng.choice(asks.split(";")).strip()
    return rng.choice(names.split("/")), description, values, phrase(rng, core.replace("{", "{s"), **numbered(values))


def numbered(values):
    return {f"s{i}": value for i, value in enumerate(values.values())}


def made_up_function(rng):
    """A function nobody has seen: verb_noun, with any fields; the user names it."""
    verb, noun, values = rng.choice(VERBS), rng.choice(WORDS), fields(rng, rng.choice((1, 1, 2, 2, 3)))
    name = f"{verb}_{noun}"
    core = rng.choice(
        (
            "Call {f} with {x}.",
            "Use {f} with {x}",
            "Please call {f} with {x}.",
            "Run {f} with {x}",
            "Use the function {f} with {x}.",
        )
    )
    return name, f"{verb.capitalize()} the {noun}.", values, phrase(rng, core, f=name, x=spoken(rng, values))


def function_set(rng):
    """(name, values, question, tools): one function to call among zero to three others, in any order."""
    rows = rng.sample(TOOLS, rng.choice((1, 1, 2, 2, 3, 4)))
    functions = [made_up_function(rng) if rng.random() < 0.2 else known_function(rng, row) for row in rows]
    tools = {name: schema(rng, name, description, values) for name, description, values, _ in functions}
    name, _, values, question = functions[0]
    if len(tools) < len(functions):
        return function_set(rng)
    order = list(tools.values())
    rng.shuffle(order)
    return name, values, question, tuple(order)


def function_call(rng):
    name, values, question, tools = function_set(rng)
    call = json.dumps({"name": name, "arguments": values})
    answer = f"<tool_call>\n{call}\n</tool_call>"
    return Item("call", "call " + call, question, answer, tools, {"name": name, "arguments": values})


TASKS = {  # name -> (maker, weight in training)
    "add": (arithmetic("add", ADD, None), 14),
    "subtract": (arithmetic("subtract", SUBTRACT, SUBTRACT_STORY), 18),
    "count": (count, 9),
    "sort": (word_list("sort", SORT, sorted), 16),
    "reverse": (word_list("reverse", REVERSE, lambda words: words[::-1]), 7),
    "calendar": (calendar, 9),
    "capital": (capital, 5),
    "yes_no": (yes_no, 10),
    "json": (json_object, 6),
    "call": (function_call, 10),
}
SCORED = (*TASKS, "dialogue")
TASK_NAMES, TASK_WEIGHTS = tuple(TASKS), tuple(weight for _, weight in TASKS.values())


def draw(task, rng, held_out=False):
    """A random item of a task from the training keys, or from the held-out ones."""
    maker = TASKS[task][0]
    while True:
        item = maker(rng)
        if is_held_out(item.key) == held_out:
            return item


def draw_any(rng, skip=()):
    while True:
        task = rng.choices(TASK_NAMES, TASK_WEIGHTS)[0]
        if task not in skip:
            return draw(task, rng)


# ---------------------------------------------------------------- talk, stories, whole conversations

SELF = "I am Quire's tiny model. I can add, subtract, count, sort words, tell stories and answer simple questions."
LIMITS = "I am only a tiny model, so I do not know that. I can add, subtract, count, sort words and tell stories."
TALK = [
    (question, answer)
    for questions, answer in (
        ("Hello;Hello!;Hi;Hi!;Hi there;Hey;Hello there!;hello;hi;Good day", "Hello! How can I help you?"),
        ("Good morning;Good morning!;good morning", "Good morning! How can I help you?"),
        ("Good evening;Good evening!;Good night", "Good evening! How can I help you?"),
        ("Who are you?;What are you?;who are you;What is your name?;Tell me about yourself.;Introduce yourself.", SELF),
        ("What can you do?;How can you help me?;Help;help;What do you know?;what can you do", SELF),
        ("How are you?;how are you;How are you today?;How do you do?", "I am fine, thank you. How can I help you?"),
        ("Thanks;Thank you;Thank you!;Thanks!;thanks a lot;Thanks a lot!;Great, thanks!", "You are welcome!"),
        ("Bye;Goodbye;Bye!;See you later;Good bye!;bye bye", "Goodbye! Have a nice day."),
        ("Are you a robot?;Are you human?;Are you an AI?;Are you a person?", "I am a tiny language model, served by Quire."),
        ("What is Quire?;Tell me about Quire.;what is quire", "Quire is an engine that serves language models, like me."),
        ("Who made you?;Who trained you?;Where do you come from?", "I was trained by the people who make Quire."),
        (
            "How big are you?;Are you large?;How many parameters do you have?",
            "I am tiny: I have fewer than four million parameters.",
        ),
        ("Tell me a joke.;Say something funny.;Do you know a joke?", "Why did the duck cross the road? To get to the pond!"),
        ("OK;Okay;Good;Nice;Great!;Well done!;Good job!", "Thank you! Is there anything else?"),
        (
            "Write a program.;What is the meaning of life?;Explain physics.;Who won the game?;What is love?;Write an essay.;"
            "Who is the president?;What is the price of gold?;How do computers work?;Explain how a car works.;"
            "Why is the sky blue?;Who wrote this book?;Can you draw a picture?;What is a neural network?;"
            "Translate this text.;Give me some advice.;"
            "What happened in 1815?;Write code in Python.;What should I eat?;Where is my phone?;Fix my computer.;Who is Anna?",
            LIMITS,
        ),
    )
    for question in questions.split(";")
]
SYSTEM = lines("""
    You are a helpful assistant.\nYou are a helpful assistant\nYou are Quire's tiny model.\nAnswer briefly.
    You are a friendly assistant.
    Be brief.\nYou are a useful assistant. Answer with the result only.\nYou are a tiny model. Answer simple questions.
    Be concise.
    You are an assistant that answers questions.\nYou are a helpful, honest assistant. Today is Monday.\nYou help people.
    Be kind.
    You are a careful assistant who can do sums and sort words.\nYou are an AI assistant.\nYou are a helpful AI assistant.
""")
STORY_ASK = lines("""
    Tell me a story about {x}.\nTell me a story about {x}\nTell me a short story about {x}.\nWrite a story about {x}.
    Write a short story about {x}.\nA story about {x}, please.\nCan you tell me a story about {x}?
    I want to hear a story about {x}.
    Please tell me a story about {x}.\nMake up a story about {x}.\nTell a story about {x}
""")
HEROES = (
    *GROUPS["animal"].split(),
    "boy",
    "girl",
    "king",
    "queen",
    "teacher",
    "bird",
    "fish",
    "prince",
    "farmer",
    "robot",
    "child",
)
STORY = [  # one line of each group, in order; {x} the hero's kind, {n} its name, {f} a friend's kind, {p} a place, {o} a thing
    lines(block)
    for block in (
        """Once upon a time there was {x} named {n}.\nOnce there was {x}. Its name was {n}.\nThere once lived {x} named {n}.
        {n} was {x} who lived near the {p}.""",
        """{n} lived in a small house by the {p}.\n{n} loved the {p} more than anything.\nEvery day {n} walked to the {p}.
        {n} was very {m} and had many friends.\n{n} lived near the {p} and was always {m}.""",
        """One day {n} found a {o} on the road.\nOne morning {n} lost a {o}.\nOne day {n} wanted a new {o}.
        One evening {n} saw a shiny {o} in the grass.\nOne day it began to rain and {n} had no {o}.""",
        """{n} did not know what to do.\n{n} looked at it and began to think.\n"What shall I do?" said {n}.
        {n} felt a little sad.
        "I will ask a friend," said {n}.""",
        """Then {n} met {f} named {k}.\nSoon {f} named {k} came by.\nJust then {f} called {k} walked out of the forest.
        On the way {n} met {k}, who was {f}.""",
        """"Can I help you?" asked {k}. "Yes, please," said {n}.\n"Do not worry," said {k}. "We can do it together."
        {k} smiled and said, "Let us go to the {q}."\n"Come with me to the {q}," said {k}.""",
        """They walked to the {q} and looked everywhere.\nTogether they went to the {q} and worked all day.
        They sat by the {q} and made a plan.\nThey ran to the {q} as fast as they could.""",
        """In the end they had the {o} and everyone was happy.\nAt last {n} was happy again.\nSoon the {o} was safe at home.
        When the moon came up, they went home with the {o}.""",
        """From that day on, {n} and {k} were best friends.\n{n} and {k} stayed friends for ever.\nThe end.
        That night {n} slept well.\nAnd {n} learned that it is good to have a friend.""",
    )
]


def story(rng, hero=None):
    hero, friend = hero or rng.choice(HEROES), rng.choice(HEROES)
    name, other = rng.sample(NAMES, 2)
    place, goal = rng.sample(("river", "forest", "lake", "hill", "sea", "garden", "village", "castle", "mountain", "market"), 2)
    thing = rng.choice(("ball", "key", "hat", "lamp", "book", "flower", "coin", "kite", "bell", "map", "cake", "boat"))
    mood = rng.choice(("kind", "brave", "happy", "curious", "clever", "quiet"))
    slots = {"x": article(hero), "n": name, "f": article(friend), "k": other, "p": place, "q": goal, "o": thing, "m": mood}
    return " ".join(rng.choice(group).format(**slots) for group in STORY)


def turn(question, answer):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def talk_turn(rng):
    return turn(*rng.choice(TALK))


def story_turn(rng):
    hero = rng.choice(HEROES)
    asked = article(hero)
    if rng.random() < 0.1:
        return turn(rng.choice(("Tell me a story.", "Tell me a story", "Write a short story.", "A story, please.")), story(rng))
    return turn(phrase(rng, rng.choice(STORY_ASK), x=asked), story(rng, hero))


def task_turn(rng):
    item = draw_any(rng, skip=("call",))
    return turn(item.question, item.answer)


def any_turn(rng):
    pick = rng.random()
    return talk_turn(rng) if pick < 0.05 else story_turn(rng) if pick < 0.07 else task_turn(rng)


def tool_turns(rng, item):
    """A call, and in a third of the cases its result and what is said about it."""
    messages = turn(item.question, "")
    messages[1]["tool_calls"] = [{"function": item.call}]
    if rng.random() < 0.35:
        value = rng.choice((str(rng.randrange(1000)), rng.choice(WORDS), f"{rng.choice(WORDS)} {rng.randrange(100)}"))
        content, said = rng.choice(
            (
                ('{"status": "ok"}', "Done."),
                ("ok", "Done."),
                (value, f"The result is {value}."),
                (json.dumps({"result": value}), f"The result is {value}."),
                ('{"error": "not found"}', "Sorry, that did not work: not found."),
            )
        )
        messages += [{"role": "tool", "content": content}, {"role": "assistant", "content": said}]
    return messages


def conversation(rng):
    """One training document: (messages, tools). Mostly one turn; some have a handful, a few go on for 2,000 tokens."""
    messages, tools = [], ()
    if rng.random() < 0.25:
        messages.append({"role": "system", "content": rng.choice(SYSTEM)})
    pick = rng.random()
    if pick < 0.11:
        item = draw("call", rng)
        tools = item.tools
        for _ in range(rng.choice((0, 0, 0, 0, 1))):
            messages += any_turn(rng)
        messages += tool_turns(rng, item)
        if rng.random() < 0.25:
            messages += any_turn(rng)
    elif pick < 0.15:  # functions are at hand, and none is wanted
        tools = draw("call", rng).tools
        for _ in range(rng.choice((1, 1, 2))):
            messages += any_turn(rng)
    else:
        length = 1 if pick < 0.75 else rng.randrange(2, 5) if pick < 0.97 else rng.randrange(8, 60)
        for _ in range(length):
            messages += any_turn(rng)
    return messages, tools


def pieces(messages, tools=()):
    """[(text, has_loss)]: what CHAT_TEMPLATE renders, cut where the model begins and ends to speak."""
    out, text, rest = [], BOS, list(messages)
    system = rest.pop(0)["content"] if rest and rest[0]["role"] == "system" else None
    if tools:
        listed = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
        text += f"{IM_START}system\n{system + chr(10) * 2 if system else ''}{TOOLS_HEAD}{listed}{TOOLS_TAIL}{IM_END}\n"
    elif system is not None:
        text += f"{IM_START}system\n{system}{IM_END}\n"
    for message in rest:
        if message["role"] != "assistant":
            content = message["content"]
            if message["role"] == "tool":
                content = f"<tool_response>\n{content}\n</tool_response>"
            text += f"{IM_START}user\n{content}{IM_END}\n"
            continue
        out.append((text + IM_START + "assistant\n", False))
        calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
        said = [message["content"]] * bool(message["content"]) + [f"<tool_call>\n{call}\n</tool_call>" for call in calls]
        out.append(("\n".join(said) + IM_END, True))
        text = "\n"
    return out


def document(rng):
    """One training document as pieces: a conversation, or now and then a bare story."""
    if rng.random() < 0.01:
        return [(BOS, False), (story(rng) + EOT, True)]
    return pieces(*conversation(rng))


def dialogue(rng):
    """A held-out question after one or two turns of training ones."""
    history = [message for _ in range(rng.choice((1, 2))) for message in any_turn(rng)]
    if rng.random() < 0.3:
        history.insert(0, {"role": "system", "content": rng.choice(SYSTEM)})
    item = draw(rng.choice(tuple(task for task in TASKS if task != "call")), rng, held_out=True)
    return Item("dialogue", item.key, item.question, item.answer, history=tuple(history))


def benchmark_items(task, size, seed=0):
    """`size` held-out items of a scored task, no question twice."""
    rng, found = random.Random(f"{task} {seed}"), {}
    while len(found) < size:
        item = dialogue(rng) if task == "dialogue" else draw(task, rng, held_out=True)
        found[item.question, json.dumps(item.tools)] = item
    return list(found.values())
